"""Which model a chat talks with: it is found among this user's daemons, and described."""

import dataclasses
import shlex
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.cli.connected import connected
from frontend.cli.info import as_lines
from frontend.cli.options import DaemonOptions, SamplingOptions, read_template, through_preset
from frontend.errors import InvalidInput
from frontend.event_loop import LoopThread
from frontend.presets.llm import PresetLLM, names_of
from frontend.sampling_params import RequestOutputKind, SamplingParams
from protocol.presets import find_preset, model_of
from protocol.running_daemons import RunningDaemon, running_daemons


def reached_daemon(model: str) -> RunningDaemon | None:
    """This user's daemon on a Unix socket (others may want a key) that serves what goes by this
    name: a folder, file, known name, hub id, or a preset's."""
    asked = {*names_of(model_of(model)), *names_of(model)}
    for daemon in running_daemons():
        if daemon.address.startswith("ipc://") and asked & {daemon.asked, daemon.model}:
            return daemon
    return None


@dataclasses.dataclass
class ChatModel:
    """Open until `close`."""

    llm: AsyncLLM
    system: str | None
    """The preset's system message."""
    params: SamplingParams
    """What was typed, over the defaults of the preset and the model."""
    chat_template: str | None
    close: Callable[[], None]

    @classmethod
    def open(
        cls,
        loop: LoopThread,
        daemon: DaemonOptions,
        preset: str | None,
        sampling: SamplingOptions,
        chat_template: Path | None = None,
    ) -> Self:
        """Raises:
        UsageError: sampling options outside their limits, no such preset, or no chat template.
        EngineClientError: no engine answers.
        """
        connection = connected(daemon, "chat")

        def close() -> None:
            loop.run_and_wait(connection.__aexit__(None, None, None))

        llm = loop.run_and_wait(connection.__aenter__())
        try:
            llm, system = through_preset(llm, preset), None
            if isinstance(llm, PresetLLM):  # /system shows, sets and removes its text, too
                system = llm.preset.system
                llm = PresetLLM(llm.llm, msgspec.structs.replace(llm.preset, system=None))
            params = sampling.to_params(llm, RequestOutputKind.DELTA)
            return cls(llm, system, params, read_template(chat_template, llm), close)
        except BaseException:
            close()
            raise

    @classmethod
    def load(cls, loop: LoopThread, name: str, sampling: SamplingOptions) -> Self:
        """That of this user's daemons which serves `name`.

        Raises:
            InvalidInput: there is none.
            UsageError, EngineClientError: as `open`.
        """
        preset, found = find_preset(name), reached_daemon(name)
        command = f"`engine-client run {shlex.quote(name)}`"
        if preset is not None and preset.adapter is not None:
            raise InvalidInput(f"{name} has an adapter; {command} starts a daemon that has it")
        if found is None:
            raise InvalidInput(
                f"none of your daemons serves {name} (/model lists them); {command} in another "
                "terminal starts one"
            )
        options = DaemonOptions(address=found.address)
        return cls.open(loop, options, None if preset is None else name, sampling)

    def described(self, params: SamplingParams, system: str | None, num_messages: int) -> str:
        """Lines: what is served, its context, and how this conversation uses it."""
        model, llm = self.llm.model, self.llm
        preset = {"preset of": llm.preset.from_} if isinstance(llm, PresetLLM) else {}
        size = f", {model.num_weights / 1e6:,.0f} million weights" if model.num_weights else ""
        default, given = SamplingParams(), []
        for name in typing.get_type_hints(SamplingOptions):
            value = getattr(params, name)
            if name == "temperature" or value not in (None, getattr(default, name)):
                given.append(f"{name} {value}")
        takes = ["text"] if model.multimodal is None else ["text", *model.multimodal.max_items]
        return as_lines(
            {
                "model": f"{model.name} ({model.architecture}{size})",
                **preset,
                "formats": model.formats or model.dtype,
                "context": f"{model.max_model_len:,} tokens, prompt and answer",
                "takes": ", ".join(takes),
                "adapters": ", ".join(each.name for each in model.adapters) or "none",
                "address": llm.address,
                "parameters": ", ".join(given),
                "system": system or "none",
                "conversation": f"{num_messages} messages",
            }
        )


def daemons_lines(address: str) -> str:
    """This user's daemons, a line each; the one at `address` has a mark."""
    return "\n".join(
        f"{'*' if each.address == address else ' '} {each.asked or each.model}  {each.address}"
        f"{'' if each.is_ready else '  (starting)'}"
        for each in running_daemons()
    )
