"""Fuzzes a served engine: `python -m tests.fuzz.server.run --time 600`. What fails is tried again
alone, and sent again by `--case GENERATOR:SEED`. The output's last line is one JSON document."""

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.fuzz.server.bodies import Bodies
from tests.fuzz.server.cases import Case, Generator, chat
from tests.fuzz.server.frames import frames
from tests.fuzz.server.grammars import constraints, templates
from tests.fuzz.server.stage import Seen, Stage, say

_AT_ONCE = 4
_WARM_UP = 4
_OWN_GAP_S = 0.1
"""Beyond the largest gap beside ordinary long prompts."""
_OWN_CHAT_S = 1.0
_SETTLE_S = 1.5
_RETURN_S = 10.0
_GROWTH_MIB = {"engine": 150, "server": 150}
_TRIES = 2


@dataclasses.dataclass
class Sent:
    key: str
    case: Case
    began_s: float
    ended_s: float = float("inf")


@dataclasses.dataclass
class Failure:
    case: str
    what: str
    why: str
    after_s: float


class Run:
    def __init__(self, stage: Stage, generators: dict[str, Generator], seed: int) -> None:
        self._stage = stage
        self._generators = generators
        self._random = Random(seed)
        self.limits = {"stream": 0.0, "chat": 0.0}
        self._texts: dict[str, str] = {}
        self._num_looked_at = 0
        self._began_s = time.monotonic()
        self.counts = dict.fromkeys(generators, 0)
        self.largest = {"stream": 0.0, "chat": 0.0}
        self.failures: list[Failure] = []

    async def calibrate(self) -> None:
        """The other client alone, then beside prompts as long as the model takes, in its words."""
        while {seen.kind for seen in self._stage.seen[:-_WARM_UP]} != {"stream", "chat"}:
            await asyncio.sleep(0.2)
        for seen in self._stage.seen:
            assert seen.status == 200, seen
            self._texts.setdefault(seen.kind, seen.text)
        for number in range(3):
            text = f"{number} the quick brown fox jumps over the lazy dog " * 500
            ordinary = chat(messages=[{"role": "user", "content": text}])
            await self._stage.send(Case("an ordinary one", ordinary))
        await asyncio.sleep(_SETTLE_S)
        for seen in self._stage.seen:
            self.limits[seen.kind] = max(self.limits[seen.kind], seen.gap_s)
        self._num_looked_at = len(self._stage.seen)
        self._began_s = time.monotonic()
        say(f"largest gaps of its own: {self.limits}")
        self.limits["stream"] += _OWN_GAP_S
        self.limits["chat"] += _OWN_CHAT_S

    def make(self, key: str) -> Case:
        """`key`: a generator and a seed."""
        name, _, seed = key.partition(":")
        return self._generators[name](Random(int(seed)))

    async def go_on_until(self, over_s: float) -> None:
        sent: list[Sent] = []
        tasks: set[asyncio.Task[None]] = set()
        while time.monotonic() < over_s:
            while len(tasks) < _AT_ONCE:
                name = self._random.choice([*self._generators])
                key = f"{name}:{self._random.getrandbits(40)}"
                self.counts[name] += 1
                one = Sent(key, self.make(key), time.monotonic())
                sent.append(one)
                tasks.add(asyncio.create_task(self.send(one)))
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
            if wrong := self.look():
                await asyncio.gather(*tasks)
                tasks = set()
                await self.find(wrong, sent)
            sent = [each for each in sent if each.ended_s > time.monotonic() - 30]
        await asyncio.gather(*tasks)
        await asyncio.sleep(_SETTLE_S)
        if wrong := self.look():
            await self.find(wrong, sent)

    async def send(self, one: Sent) -> None:
        problems = await self._stage.send(one.case)
        one.ended_s = time.monotonic()
        for problem in problems[:1]:
            self._note(one, problem)

    def look(self) -> list[Seen]:
        """What the other client met that it should not have, since the last look."""
        new = self._stage.seen[self._num_looked_at :]
        self._num_looked_at += len(new)
        for seen in new:
            self.largest[seen.kind] = max(self.largest[seen.kind], seen.gap_s)
        wrong = [
            seen
            for seen in new
            if seen.status != 200
            or seen.gap_s > self.limits[seen.kind]
            or seen.text != self._texts[seen.kind]
        ]
        if self._stage.engine_changed():
            now_s = time.monotonic()
            wrong.append(Seen("engine", 0, 1.0, now_s, "another process"))
        return wrong

    async def find(self, wrong: list[Seen], sent: list[Sent]) -> None:
        """Which of those that were there does it again, alone."""
        first_s = min(seen.at_s - seen.gap_s for seen in wrong) - 1
        last_s = max(seen.at_s for seen in wrong)
        suspects = [each for each in sent if each.began_s <= last_s and each.ended_s >= first_s]
        say(f"{_told(wrong)}: {len(suspects)} suspects")
        await self._recover()
        for one in reversed(suspects):
            again: list[Seen] = []
            for _ in range(_TRIES):
                await self._stage.send(one.case)
                await asyncio.sleep(_SETTLE_S)
                if not (again := self.look()):
                    break
                await self._recover()
            if again:
                self._note(one, _told(again))

    async def _recover(self) -> None:
        if self._stage.engine_changed():
            await self._stage.engine_is_back()
        await asyncio.sleep(_SETTLE_S)
        self.look()

    def _note(self, one: Sent, why: str) -> None:
        after_s = time.monotonic() - self._began_s
        self.failures.append(Failure(one.key, one.case.name, why, round(after_s, 1)))
        say(f"FAILED after {after_s:.0f} s: {one.case.name}, {why} (--case {one.key})")

    async def check_memory(self, before: dict[str, float]) -> None:
        deadline_s = time.monotonic() + _RETURN_S
        while True:
            grown = {name: size - before[name] for name, size in self._stage.memory_mib().items()}
            over = {name: size for name, size in grown.items() if size > _GROWTH_MIB[name]}
            if not over or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.5)
        say(f"memory grew by {grown} MiB")
        for name, size in over.items():
            self.failures.append(Failure("", name, f"its memory grew by {size:.0f} MiB", 0.0))


def _told(wrong: list[Seen]) -> str:
    worst = max(wrong, key=lambda seen: (seen.kind == "engine", seen.status != 200, seen.gap_s))
    if worst.kind == "engine":
        return "the engine died"
    if worst.status != 200:
        return f"another's {worst.kind} ended with {worst.status} {worst.text[:100]}"
    return f"another's {worst.kind} stood for {worst.gap_s:.2f} s, or had another text"


async def fuzz(options: argparse.Namespace, folder: Path) -> int:
    async with Stage(folder, options.model) as stage:
        bodies = Bodies(
            stage.document("/openapi.json"), stage.document("/v1/models")["data"][0]["id"]
        )
        generators: dict[str, Generator] = {
            "bodies": bodies, "http": bodies.broken, "constraints": constraints,
            "templates": templates, "frames": frames,
        }  # fmt: skip
        if options.only:
            generators = {name: generators[name] for name in options.only}
        run = Run(stage, generators, options.seed)
        await run.calibrate()
        before = stage.memory_mib()
        for key in options.case:
            one = Sent(key, run.make(key), time.monotonic())
            await run.send(one)
            await asyncio.sleep(_SETTLE_S)
            if wrong := run.look():
                await run.find(wrong, [one])
        if not options.case:
            await run.go_on_until(time.monotonic() + options.time)
        await run.check_memory(before)
        problems = await stage.end()
        run.failures += [Failure("", "the end", problem, 0.0) for problem in problems]
        document = {
            "seed": options.seed, "seconds": options.time, "cases": run.counts,
            "largest_gap_s": run.largest, "limits_s": run.limits,
            "failures": [dataclasses.asdict(each) for each in run.failures],
        }  # fmt: skip
        if run.failures:
            say(f"the log ends with\n{stage.log()[-2000:]}")
    print(json.dumps(document))
    return 1 if run.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", type=float, default=600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="*", help="these generators")
    parser.add_argument("--case", action="append", default=[], metavar="GENERATOR:SEED")
    with tempfile.TemporaryDirectory(prefix="fuzz-server-") as folder:
        return asyncio.run(fuzz(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
