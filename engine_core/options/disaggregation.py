"""Options of disaggregated prefill: engines that compute prompts, and engines that go on with
them."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import DISAGGREGATION, POSITIVE, SIZE

_BUFFER_BYTES = 1 << 30
_TIMEOUT_S = 10.0
_OPTIONS_OF = {
    "prefill": ("kv_transfer_bind", "kv_transfer_keys", "kv_transfer_buffer"),
    "decode": (
        "kv_transfer_source",
        "kv_transfer_key",
        "kv_transfer_buffer",
        "kv_transfer_timeout",
    ),
}


@Parameter(name="*", group=DISAGGREGATION.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregationOptions:
    disaggregation_mode: Literal["prefill", "decode"] | None = None
    """prefill: keep the KV blocks of prompts in memory and give them to other engines; decode:
    fetch them there; CPU only."""
    kv_transfer_bind: str | None = None
    """prefill: where other engines get blocks: ipc://PATH or tcp://HOST:PORT, as they reach it."""
    kv_transfer_keys: Path | None = None
    """prefill: the folder with the keys of engines that may get blocks over TCP."""
    kv_transfer_source: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """decode: another engine's --kv-transfer-bind, whose blocks are believed; may be given several
    times."""
    kv_transfer_key: Path | None = None
    """decode: an admin's key file, for sources with keys."""
    kv_transfer_buffer: Annotated[int | None, SIZE, POSITIVE] = None
    """Most memory for blocks that are given away or were fetched (default 1GiB)."""
    kv_transfer_timeout: Annotated[float | None, POSITIVE] = None
    """decode: seconds for a prompt's blocks (default 10); what is late is computed."""

    @property
    def buffer_bytes(self) -> int:
        return self.kv_transfer_buffer or _BUFFER_BYTES

    @property
    def timeout_s(self) -> float:
        return self.kv_transfer_timeout or _TIMEOUT_S

    def check(self) -> None:
        """Raises ConfigurationError: an option without effect, or one that is missing."""
        mode = self.disaggregation_mode
        known = () if mode is None else _OPTIONS_OF[mode]
        for field in dataclasses.fields(self)[1:]:
            if getattr(self, field.name) not in (None, ()) and field.name not in known:
                option = "--" + field.name.replace("_", "-")
                of = " or ".join(name for name, each in _OPTIONS_OF.items() if field.name in each)
                raise ConfigurationError(
                    f"{option} has no effect without --disaggregation-mode {of}; omit it, or give "
                    "both"
                )
        if mode == "prefill" and self.kv_transfer_bind is None:
            raise ConfigurationError(
                "--disaggregation-mode prefill needs --kv-transfer-bind, the address at which "
                "other engines get blocks, such as tcp://10.0.0.1:5700"
            )
        if mode == "decode" and not self.kv_transfer_source:
            raise ConfigurationError(
                "--disaggregation-mode decode needs --kv-transfer-source, the --kv-transfer-bind "
                "of an engine that computes prompts"
            )
