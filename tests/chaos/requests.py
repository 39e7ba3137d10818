"""Runs one request as a user would, and compares what came with what an undisturbed engine gave."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

from frontend import AsyncLLM, RequestOutput, RequestOutputKind
from tests.chaos.cases import Case

_LOGPROB_TOLERANCE = 1e-4
_SLOW_S = 0.05
_BUSY_S, _BUSY_EVERY = 0.5, 5
BEHAVIOURS = ("read",) * 14 + ("leave", "abort", "abort", "timeout", "timeout", "slow", "busy")


@dataclasses.dataclass
class Sequence:
    """One sample or beam, in numbers that JSON has."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[list[tuple[int, float]]] | None = None


@dataclasses.dataclass
class Answer:
    """All that came of one request."""

    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    """Seen while it came: a stream that shrank, a second end."""
    num_ends: int = 0
    num_resumptions: int = 0
    gaps_s: list[float] = dataclasses.field(default_factory=list)
    """From the last output before a loss of the engine to the first behind it."""
    first_token_s: float | None = None
    per_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclasses.dataclass(frozen=True)
class Use:
    """What the user does with a request: `behaviour` after `after_tokens` tokens."""

    behaviour: str = "read"
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    after_tokens: int = 0
    timeout_s: float | None = None

    @classmethod
    def draw(cls, random: Random, case: Case) -> "Use":
        kind = random.choice(list(RequestOutputKind))
        behaviour = random.choice(BEHAVIOURS)
        if case.is_beam_search:
            return cls("read")
        if behaviour in ("leave", "abort"):
            kind = random.choice([RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
        return cls(
            behaviour,
            kind,
            after_tokens=random.randint(1, 20),
            timeout_s=random.uniform(0.3, 8.0) if behaviour == "timeout" else None,
        )


async def run_request(
    llm: AsyncLLM,
    case: Case,
    use: Use,
    request_id: str | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Fills `answer` and returns it. Raises what the library raises."""
    answer = answer or Answer()
    if case.is_beam_search:
        await _run_beams(llm, case, request_id, answer)
        return answer
    answer.sequences = [Sequence() for _ in range(case.arguments.get("n", 1))]
    params = case.params(output_kind=use.kind)
    is_chat = case.kind == "chat"
    stream = (llm.chat if is_chat else llm.generate)(
        case.messages if is_chat else case.prompt, params, request_id, timeout_s=use.timeout_s
    )
    last_s = time.monotonic()
    is_aborted = False
    num_outputs = 0
    async with contextlib.aclosing(stream) as outputs:
        async for output in _checked(outputs, answer):
            now_s = time.monotonic()
            if output.metrics.num_resumptions > answer.num_resumptions:
                answer.num_resumptions = output.metrics.num_resumptions
                if use.kind is not RequestOutputKind.FINAL_ONLY:
                    answer.gaps_s.append(now_s - last_s)
            last_s = now_s
            append_output(answer, output, use.kind)
            if use.behaviour == "slow":
                await asyncio.sleep(_SLOW_S)
            num_outputs += 1
            if use.behaviour == "busy" and num_outputs % _BUSY_EVERY == 0:
                time.sleep(_BUSY_S)  # the event loop and its other clients stand still
            if answer.num_tokens >= use.after_tokens and not output.finished and not is_aborted:
                if use.behaviour == "leave":
                    break
                if use.behaviour == "abort":
                    is_aborted = True
                    await llm.abort(output.request_id)
            metrics = output.metrics
            answer.first_token_s = metrics.first_token_s
            num_tokens = answer.num_tokens
            if metrics.first_token_s is not None and num_tokens > len(answer.sequences):
                assert metrics.last_token_s is not None
                steps = num_tokens / len(answer.sequences) - 1
                answer.per_token_s = (metrics.last_token_s - metrics.first_token_s) / steps
    return answer


async def _checked(
    outputs: AsyncIterator[RequestOutput], answer: Answer
) -> AsyncIterator[RequestOutput]:
    async for output in outputs:
        if answer.num_ends:
            answer.problems.append("an output behind the end")
        answer.num_ends += output.finished
        yield output


async def _run_beams(llm: AsyncLLM, case: Case, request_id: str | None, answer: Answer) -> None:
    found = await llm.beam_search(case.prompt, case.beam_params(), request_id)
    answer.num_ends = 1
    for beam in found.sequences:
        answer.sequences.append(
            Sequence(
                beam.output_token_ids,
                beam.text,
                beam.finish_reason,
                beam.stop_reason,
                [[(0, beam.cum_logprob)]],
            )
        )
    if found.detail is not None:
        answer.problems.append(f"the beam search failed: {found.detail}")


def append_output(answer: Answer, output: RequestOutput, kind: RequestOutputKind) -> None:
    for part in output.outputs:
        sequence = answer.sequences[part.index]
        logprobs = None
        if part.logprobs is not None:
            logprobs = [[(i, p.logprob) for i, p in entry.items()] for entry in part.logprobs]
        if kind is RequestOutputKind.DELTA:
            if sequence.reason is not None:
                answer.problems.append(f"sequence {part.index} goes on behind its end")
            sequence.token_ids += part.token_ids
            sequence.text += part.text
            if logprobs is not None:
                sequence.logprobs = (sequence.logprobs or []) + logprobs
        else:
            if part.token_ids[: len(sequence.token_ids)] != sequence.token_ids:
                answer.problems.append(f"the tokens of sequence {part.index} shrank or changed")
            if not part.text.startswith(sequence.text):
                answer.problems.append(f"the text of sequence {part.index} shrank or changed")
            if sequence.reason not in (None, part.finish_reason):
                answer.problems.append(f"sequence {part.index} has a second end")
            sequence.token_ids, sequence.text = part.token_ids, part.text
            sequence.logprobs = logprobs
        sequence.reason, sequence.stop_reason = part.finish_reason, part.stop_reason


def compare(
    case: Case, use: Use, answer: Answer, expected: list[dict[str, Any]], decode: Any
) -> list[str]:
    """What is wrong with an answer; nothing if it is what the undisturbed engine gave.

    Args:
        decode: token ids to text, all at once.
    """
    problems = list(answer.problems)
    is_left = use.behaviour == "leave" and answer.num_ends == 0
    if answer.num_ends != 1 and not is_left:
        problems.append(f"{answer.num_ends} ends")
    if len(answer.sequences) != len(expected):
        problems.append(f"{len(answer.sequences)} sequences, not {len(expected)}")
    ended_early = {"abort": "abort", "timeout": "timeout"}.get(use.behaviour)
    for index, (got, wanted) in enumerate(zip(answer.sequences, expected, strict=False)):
        is_cut = (is_left and got.reason is None) or (
            got.reason is not None and got.reason == ended_early
        )
        problems += [
            f"sequence {index}: {problem}"
            for problem in _compare_sequence(case, got, wanted, decode, is_cut=is_cut)
        ]
    return problems


def _compare_sequence(
    case: Case, got: Sequence, wanted: dict[str, Any], decode: Any, *, is_cut: bool
) -> list[str]:
    problems = []
    tokens = wanted["token_ids"]
    if got.token_ids != (tokens[: len(got.token_ids)] if is_cut else tokens):
        problems.append("wrong tokens")
    if is_cut:
        # what was held back for a stop string, or for the rest of a character, is released
        whole = decode(tokens)
        if not whole.startswith(got.text.rstrip("\ufffd")):
            problems.append("wrong text")
    else:
        if got.text != wanted["text"]:
            problems.append("wrong text")
        if (got.reason, got.stop_reason) != (wanted["reason"], wanted["stop_reason"]):
            problems.append(f"ended with {got.reason} ({got.stop_reason})")
        has_stop = bool(case.arguments.get("stop"))
        if not has_stop and not case.is_beam_search and got.text != decode(got.token_ids):
            problems.append("its text is not its tokens'")
    if wanted["logprobs"] is not None:
        problems += _compare_logprobs(got, wanted["logprobs"], is_beam=case.is_beam_search)
    elif got.logprobs is not None:
        problems.append("logprobs that were not asked")
    return problems


def _compare_logprobs(got: Sequence, wanted: list[Any], *, is_beam: bool) -> list[str]:
    entries = got.logprobs or []
    if not is_beam and len(entries) != len(got.token_ids):
        return [f"{len(entries)} logprobs for {len(got.token_ids)} tokens"]
    for position, (mine, theirs) in enumerate(zip(entries, wanted, strict=False)):
        if [token for token, _ in mine] != [token for token, _ in theirs]:
            return [f"logprobs of other tokens at {position}"]
        off = max(abs(a - b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
        if off > _LOGPROB_TOLERANCE:
            return [f"a logprob at {position} is off by {off:g}"]
    return []
