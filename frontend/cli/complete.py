"""`engine-client complete`: one prompt, its text or one JSON document on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.cli.options import EXIT_FAULT, SamplingOptions, SchedulingOptions, print_fault
from frontend.errors import EngineClientError
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was asked for."""

    prompt: str
    is_message: bool
    """A user's message, not a text to go on from."""
    system: str | None
    n: int
    logprobs: int | None
    prints_json: bool
    streams: bool
    sampling: SamplingOptions
    scheduling: SchedulingOptions


@dataclass
class _Sequence:
    """One completion, gathered from its increments."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def append_part(self, part: CompletionOutput) -> None:
        self.texts.append(part.text)
        self.token_ids += part.token_ids
        for token_id, entry in zip(part.token_ids, part.logprobs or [], strict=False):
            sampled = entry[token_id]
            self.logprobs.append(
                {
                    "token_id": token_id,
                    "token": sampled.decoded_token,
                    "logprob": sampled.logprob,
                    "rank": sampled.rank,
                    "top": [
                        {"token_id": other, "token": top.decoded_token, "logprob": top.logprob}
                        for other, top in entry.items()
                    ],
                }
            )
        self.last = part

    def document(self, *, with_logprobs: bool) -> dict[str, Any]:
        last = self.last
        document: dict[str, Any] = {
            "text": "".join(self.texts),
            "token_ids": self.token_ids,
            "finish_reason": None if last is None else last.finish_reason,
            "stop_reason": None if last is None else last.stop_reason,
            "detail": None if last is None else last.detail,
        }
        if with_logprobs:
            document["logprobs"] = self.logprobs
        return document


async def run_complete(address: str | None, completion: Completion) -> int:
    """Returns the exit code: 1 if the engine could not finish a completion.

    Raises:
        UsageError: sampling options outside their limits.
        EngineClientError: no engine, or a prompt that cannot be served.
    """
    async with AsyncLLM(address, client_name="engine-client complete") as llm:
        params = completion.sampling.to_params(
            llm.model.default_sampling, n=completion.n, logprobs=completion.logprobs
        )
        sequences = [_Sequence() for _ in range(completion.n)]
        final: RequestOutput | None = None
        try:
            async with contextlib.aclosing(_stream(completion, llm, params)) as outputs:
                async for output in outputs:
                    for part in output.outputs:
                        sequences[part.index].append_part(part)
                        if completion.streams:
                            _write(part.text)
                    final = output
        except EngineClientError:
            if completion.streams and final is not None:
                # the fault's line must not begin behind half a line of text
                _write("\n")
            raise
        assert final is not None, "a stream ended without its last output"
        _print_end(completion, llm.model.name, sequences, final)
    return _exit_code(sequences)


def _stream(
    completion: Completion, llm: AsyncLLM, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    scheduling = dataclasses.asdict(completion.scheduling)
    if not completion.is_message:
        return llm.generate(completion.prompt, params, **scheduling)
    system = [] if completion.system is None else [("system", completion.system)]
    messages = [*system, ("user", completion.prompt)]
    return llm.chat(
        [{"role": role, "content": text} for role, text in messages], params, **scheduling
    )


def _print_end(
    completion: Completion, model: str, sequences: list[_Sequence], final: RequestOutput
) -> None:
    if completion.prints_json:
        document = _document(completion, model, sequences, final)
        _write(json.dumps(document, ensure_ascii=False) + "\n")
    elif completion.streams:
        _write("\n")
    else:
        for index, sequence in enumerate(sequences):
            heading = f"--- {index} ---\n" if completion.n > 1 else ""
            _write(heading + "".join(sequence.texts) + "\n")


def _document(
    completion: Completion, model: str, sequences: list[_Sequence], final: RequestOutput
) -> dict[str, Any]:
    documents = [
        sequence.document(with_logprobs=completion.logprobs is not None) for sequence in sequences
    ]
    num_prompt_tokens = len(final.prompt_token_ids)
    num_output_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    engine = final.metrics.engine
    document = {
        "model": model,
        "request_id": final.metrics.engine_request_id,
        "prompt": completion.prompt,
        **documents[0],
    }
    if completion.n > 1:
        document["outputs"] = documents
    document["usage"] = {
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": final.num_cached_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    document["timings"] = {
        "first_token_s": final.metrics.first_token_s,
        "last_token_s": final.metrics.last_token_s,
        "finished_s": final.metrics.finished_s,
        "engine": None if engine is None else msgspec.structs.asdict(engine),
    }
    return document


def _exit_code(sequences: list[_Sequence]) -> int:
    for sequence in sequences:
        last = sequence.last
        if last is not None and last.finish_reason in ("error", "abort"):
            print_fault(f"the engine ended the completion ({last.finish_reason}): {last.detail}")
            return EXIT_FAULT
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
