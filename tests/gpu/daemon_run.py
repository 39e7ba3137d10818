"""A daemon with random weights as a process of its own, and clients of it in this one."""

import asyncio
import dataclasses
import functools
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from frontend import AsyncLLM, RequestOutputKind, SamplingParams
from frontend.event_loop import run
from protocol.calls import EngineStatistics
from tests.gpu.model_shapes import Shape

_ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a client. `leave_after`: tokens after which the client goes away.
    `arrival_s`: after the first of all can be sent."""

    prompt: list[int]
    num_output: int
    leave_after: int | None = None
    arrival_s: float = 0.0


@dataclasses.dataclass(slots=True)
class ClientResult:
    """What its client saw.

    Attributes:
        num_ends: outputs that said that the request is over.
        is_late: something came after such an output.
        detail: why it ended, where the engine says so.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    num_ends: int = 0
    is_late: bool = False
    finish_reason: str | None = None
    detail: str | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


def is_wrong(wanted: ClientRequest, seen: ClientResult, vocab_size: int) -> bool:
    """Whether the request did not end once, with as many tokens as it asked for."""
    if seen.is_late or any(not 0 <= token < vocab_size for token in seen.tokens):
        return True
    if wanted.leave_after is not None and seen.num_ends == 0:
        return not wanted.leave_after <= len(seen.tokens) <= wanted.num_output
    has_all = len(seen.tokens) == wanted.num_output
    return not (seen.num_ends == 1 and seen.finish_reason == "length" and has_all)


class DaemonRun:
    """`with DaemonRun(shape, device="cuda") as daemon:` serves inside, and has ended afterwards.

    Args:
        model: a config.json, of random weights; or a folder.
        options: more of the daemon's command line.
        start_limit_s: for the ready line.

    Raises:
        RuntimeError: it did not become ready; with the last lines of its log.
    """

    def __init__(
        self,
        model: Shape | Path,
        *,
        device: str,
        options: Sequence[str] = (),
        start_limit_s: float = 150,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="daemon-")
        folder = Path(self._folder.name)
        command = [sys.executable, "-m", "engine_core.cli", "--device", device]
        if isinstance(model, Path):
            command += ["--model", str(model)]
        else:
            (folder / "config.json").write_text(json.dumps(model))
            command += ["--load-format", "dummy", "--model-config", str(folder / "config.json")]
        command += ["--bind", f"ipc://{folder}/socket", "--exit-on-stdin-eof", *options]
        self._log = folder / "log"
        self._limit_s = start_limit_s
        self._started_s = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def __enter__(self) -> "DaemonRun":
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], self._limit_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            last = " | ".join(self._log.read_text().strip().splitlines()[-5:])
            self._end()
            raise RuntimeError(
                f"the daemon was not ready within {self._limit_s:g} s: {last[-600:]}"
            )
        self.launch_to_ready_s = time.monotonic() - self._started_s
        self.ready: dict[str, Any] = json.loads(line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def phases(self) -> dict[str, float | None]:
        """Seconds of the start's phases, as far as the daemon says."""
        log = self._log.read_text()
        phases = {f"{name}_s": seconds for name, seconds in self.ready.get("phases_s", {}).items()}
        return phases | {
            "launch_to_ready_s": round(self.launch_to_ready_s, 3),
            "ready_s": self.ready["ready_s"],
            "load_s": _number(r": loaded .* in ([0-9.]+) s", log),
            "warm_after_s": _number(r"warm after ([0-9.]+) s", log),
            "num_compiled": _number(r"; ([0-9]+) kernels were compiled or loaded", log),
        }

    def serve(
        self,
        requests: Sequence[ClientRequest],
        *,
        temperature: float = 0.6,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> list[ClientResult]:
        """All of them, of one client, each when it arrives."""
        return run(_serve(self.ready["address"], requests, temperature, output_kind))

    def statistics(self) -> EngineStatistics:
        """The engine's own."""
        return run(_statistics(self.ready["address"]))

    def stop(self) -> int:
        """Ask it to end. Returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_STOP_S)

    def _end(self) -> None:
        try:
            if self._process.poll() is None:
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._folder.cleanup()


def _number(pattern: str, log: str) -> float | None:
    found = re.search(pattern, log)
    return None if found is None else float(found[1])


async def _statistics(address: str) -> EngineStatistics:
    async with AsyncLLM(address) as llm:
        return await llm.statistics()


async def _serve(
    address: str,
    requests: Sequence[ClientRequest],
    temperature: float,
    output_kind: RequestOutputKind,
) -> list[ClientResult]:
    async with AsyncLLM(address) as llm:
        follow = functools.partial(_follow, llm, temperature=temperature, output_kind=output_kind)
        return await asyncio.gather(*map(follow, requests))


async def _follow(
    llm: AsyncLLM, wanted: ClientRequest, *, temperature: float, output_kind: RequestOutputKind
) -> ClientResult:
    seen = ClientResult()
    await asyncio.sleep(wanted.arrival_s)
    started_s = time.perf_counter()
    params = SamplingParams(
        max_tokens=wanted.num_output,
        temperature=temperature,
        ignore_eos=True,
        output_kind=output_kind,
    )
    stream = llm.generate({"prompt_token_ids": wanted.prompt}, params)
    async for output in stream:
        seen.is_late |= seen.num_ends > 0
        completion = output.outputs[0]
        if seen.first_token_s is None:
            seen.first_token_s = time.perf_counter() - started_s
        seen.last_token_s = time.perf_counter() - started_s
        seen.tokens += completion.token_ids
        seen.num_ends += output.finished
        seen.finish_reason, seen.detail = completion.finish_reason, completion.detail
        if wanted.leave_after is not None and len(seen.tokens) >= wanted.leave_after:
            await stream.aclose()
            break
    return seen
