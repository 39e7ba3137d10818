"""Libraries in a Python of their own, asked through standard input (`peers/wire.py`).

Owns their command line and their answers. Must not know what they do with a request: that is
`peers/NAME_peer.py`, which runs where nothing of this project is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.comparison.descriptions import Description, DescriptionError, describe
from scripts.comparison.launching import Conditions, Launched, NotMeasured, Running, SystemFailed
from scripts.comparison.openai_stream import Server
from scripts.comparison.systems import ServerAddress
from scripts.comparison.workloads import Workload
from scripts.load.records import RequestRecord

PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class OfflinePeer:
    """
    Attributes:
        program: one of `peers/`.
        options: of the program, such as model and dtype.
    """

    description: Description
    program: Path
    interpreter: str
    options: dict[str, str]

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def setting(self) -> str:
        return self.description.setting

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        """See `System.launch`. Times are taken in its process, where no client is needed."""
        options = {"model": conditions.model, **self.options, "threads": conditions.num_threads}
        command = [self.interpreter, str(self.program), json.dumps(options)]
        launched = Launched(self.description, command, conditions, keep_lines=True)
        try:
            facts = launched.wait_for_ready_line()
            ready_s = launched.since_launch_s
            facts.pop("event")

            def run(workload: Workload) -> list[RequestRecord]:
                if workload.needs_arrivals:
                    raise NotMeasured("requests that arrive one by one need a server")
                requests = [
                    [one.num_output_tokens, one.prompt_token_ids] for one in workload.requests
                ]
                launched.process.write_line(json.dumps(requests))
                return _records(workload, launched.next_line(conditions.workload_timeout_s))

            yield Running(run, ready_s, True, facts)
        finally:
            launched.process.end()


def parse_peer(text: str) -> OfflinePeer | ServerAddress:
    """`NAME=INTERPRETER [KEY=VALUE ...]` or `NAME=URL`.

    Raises:
        DescriptionError: no name, a library that is not known, or words that are no options.
    """
    description = describe(text, "--peer")
    if not description.words:
        raise DescriptionError(f"--peer {text!r} names no interpreter or URL after its =")
    target, *rest = description.words
    if "://" in target:
        if rest or description.environment:
            raise DescriptionError(f"--peer {text!r}: a URL takes no options")
        try:
            Server.at(target)
        except ValueError as error:
            raise DescriptionError(f"--peer {text!r}: {error}") from error
        return ServerAddress(description.name, text, target)
    if wrong := [word for word in rest if "=" not in word]:
        raise DescriptionError(f"--peer {text!r}: {wrong[0]!r} is not KEY=VALUE")
    options = dict(word.split("=", 1) for word in rest)
    kind = options.pop("kind", description.name.split("-")[0]).replace(".", "_")
    program = PEERS / f"{kind}_peer.py"
    if not program.is_file():
        known = sorted(path.stem.removesuffix("_peer") for path in PEERS.glob("*_peer.py"))
        raise DescriptionError(
            f"--peer {text!r}: {kind!r} is no library that is known; begin the name with one of "
            f"{', '.join(known)}, or say which with kind="
        )
    return OfflinePeer(description, program, target, options)


def _records(workload: Workload, answer: dict[str, Any]) -> list[RequestRecord]:
    if answer.get("event") == "not measured":
        raise NotMeasured(str(answer.get("reason")))
    if answer.get("event") != "done":
        raise SystemFailed(str(answer.get("reason", answer))[:500])
    told = answer["records"]
    if len(told) != len(workload.requests):
        raise SystemFailed(f"{len(told)} answers to {len(workload.requests)} requests")
    return [
        RequestRecord(
            index, 0.0, 0.0, num_prompt_tokens=len(request.prompt_token_ids), **told[index]
        )
        for index, request in enumerate(workload.requests)
    ]
