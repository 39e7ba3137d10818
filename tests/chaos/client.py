"""A client process of a run: several AsyncLLM clients, each with one request after the other, and a
line of JSON for each begin and end. SIGTERM: finish what runs, then exit."""

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, TextIO

import frontend
from frontend import AsyncLLM
from frontend.errors import RequestRejected
from protocol.errors import ErrorCode
from tests.chaos.cases import make_cases
from tests.chaos.options import Options
from tests.chaos.requests import Answer, Use, compare, run_request

_AGAIN_S = 0.5


class ClientProcess:
    """`folder`: of the run, with its settings, and for each case its sequences."""

    def __init__(self, folder: Path, name: str, seed: int, log: TextIO) -> None:
        settings = json.loads((folder / "settings.json").read_text())
        self._address = settings.pop("address")
        self._options = Options(**settings)
        self._name = name
        self._seed = seed
        self._log = log
        self._cases = make_cases(self._options.seed, self._options.num_cases)
        self._references = json.loads((folder / "references.json").read_text())
        self._stop = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        self._write("start", pid=os.getpid(), num_descriptors=num_descriptors())
        # all threads of asyncio's pool, so that those that come later are growth
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.02) for _ in range(64)))
        async with asyncio.TaskGroup() as group:
            for number in range(self._options.clients_per_process):
                group.create_task(
                    self._client(f"{self._name}.{number}", Random(self._seed + number))
                )
        self._write("exit", num_descriptors=num_descriptors())

    def _write(self, event: str, **fields: Any) -> None:
        print(json.dumps({"at_s": time.monotonic(), "event": event} | fields), file=self._log)

    async def _client(self, name: str, random: Random) -> None:
        numbers = itertools.count()
        while not self._stop.is_set():
            llm = await self._connect(name)
            if llm is None:
                return
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._options.requests_at_once):
                        group.create_task(self._requests(llm, name, numbers, random))
            finally:
                await llm.close()
            del llm
            gc.collect()  # a soak measures what is kept, not what is collected later

    async def _requests(
        self, llm: AsyncLLM, name: str, numbers: Iterator[int], random: Random
    ) -> None:
        """One after the other."""
        num_requests = 0
        while not self._stop.is_set() and num_requests != self._options.requests_per_client:
            await self._request(llm, f"{name}-{next(numbers)}", random)
            num_requests += 1

    async def _connect(self, name: str) -> AsyncLLM | None:
        """A client that was never connected does not wait for an engine that starts."""
        while not self._stop.is_set():
            try:
                return await AsyncLLM.connect(
                    self._address,
                    client_name=name,
                    connect_timeout_s=self._options.reconnect_timeout_s,
                    reconnect_timeout_s=self._options.reconnect_timeout_s,
                )
            except frontend.EngineUnavailable:
                await asyncio.sleep(_AGAIN_S)
        return None

    async def _request(self, llm: AsyncLLM, request_id: str, random: Random) -> None:
        case = random.choice(self._cases)
        use = Use.draw(random, case)
        fields = {
            "id": request_id,
            "case": case.number,
            "kind": case.kind,
            "use": use.behaviour,
            "output_kind": use.kind.name,
        }
        self._write("begin", **fields)
        answer = Answer()
        try:
            await run_request(llm, case, use, request_id, answer)
        except Exception as error:
            if _is_refused(error) and not answer.num_tokens:
                self._write("end", **fields, verdict="refused")
                await asyncio.sleep(_AGAIN_S)
            else:
                traceback.print_exc()
                problem = f"{error!r} after {answer.num_tokens} tokens"
                self._write("end", **fields, verdict="lost", problems=[problem])
            return
        expected = self._references[case.number]
        problems = compare(case, use, answer, expected, llm.get_tokenizer().decode)
        if problems:
            got = dataclasses.asdict(answer)
            fields |= {"use_fields": repr(use), "got": got, "expected": expected}
        self._write(
            "end",
            **fields,
            verdict="wrong" if problems else "ok",
            problems=problems,
            num_ends=answer.num_ends,
            num_tokens=answer.num_tokens,
            reasons=[sequence.reason for sequence in answer.sequences],
            num_resumptions=answer.num_resumptions,
            gaps_s=answer.gaps_s,
            first_token_s=answer.first_token_s,
            per_token_s=answer.per_token_s,
        )


def _is_refused(error: Exception) -> bool:
    """By an engine that drains: a user asks again."""
    return isinstance(error, RequestRejected) and error.code is ErrorCode.DRAINING


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    folder, log_path, name, seed = sys.argv[1:]
    with Path(log_path).open("w", buffering=1) as log:
        frontend.run(ClientProcess(Path(folder), name, int(seed), log).run())


if __name__ == "__main__":
    main()
