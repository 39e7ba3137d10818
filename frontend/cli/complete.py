"""`engine-client complete`: one prompt, its text or one JSON document on stdout."""

import contextlib
import dataclasses
import json
import sys
from typing import Any

import msgspec

from frontend.cli.connected import connected
from frontend.cli.options import (
    COMPLETION,
    DAEMON,
    EXIT_FAULT,
    SAMPLING,
    SCHEDULING,
    CompletionOptions,
    DaemonOptions,
    SamplingOptions,
    SchedulingOptions,
    UsageError,
    print_fault,
    read_template,
    through_preset,
)
from frontend.errors import EngineClientError
from frontend.event_loop import run
from frontend.logprobs import Logprob
from frontend.outputs import MAX_MODEL_LEN, CompletionOutput, RequestOutput
from frontend.sampling_params import RequestOutputKind


def complete(
    prompt: str | None = None,
    /,
    *,
    options: CompletionOptions = COMPLETION,
    sampling: SamplingOptions = SAMPLING,
    scheduling: SchedulingOptions = SCHEDULING,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """Returns the exit code: 1 if the engine could not finish a completion.

    Args:
        prompt: The text to go on from; default: standard input.

    Raises:
        UsageError: options outside their limits, or that contradict each other.
        EngineClientError: no engine, or a prompt that cannot be served.
    """
    if options.logprobs is not None and not options.json:
        raise UsageError("--logprobs is shown in JSON only; add --json")
    if options.system is not None and not options.chat:
        raise UsageError("--system is a message of a conversation; add --chat")
    if options.chat_template is not None and not options.chat:
        raise UsageError("--chat-template is for a conversation; add --chat")
    if prompt is None:
        if sys.stdin.isatty():
            raise UsageError("there is no PROMPT; give a text, or pipe one in")
        prompt = sys.stdin.read()
    return run(_complete(daemon, prompt, options, sampling, scheduling))


async def _complete(
    daemon: DaemonOptions,
    prompt: str,
    options: CompletionOptions,
    sampling: SamplingOptions,
    scheduling: SchedulingOptions,
) -> int:
    kind = RequestOutputKind.DELTA if options.streams else RequestOutputKind.FINAL_ONLY
    policy = dataclasses.asdict(scheduling)
    async with connected(daemon, "complete") as client:
        llm = through_preset(client, options.preset)
        params = sampling.to_params(llm, kind, n=options.n, logprobs=options.logprobs)
        if options.chat:
            system = [] if options.system is None else [("system", options.system)]
            messages = [*system, ("user", prompt)]
            stream = llm.chat(
                [{"role": role, "content": text} for role, text in messages],
                params,
                chat_template=read_template(options.chat_template, llm),
                **policy,
            )
        else:
            stream = llm.generate(prompt, params, **policy)
        final: RequestOutput | None = None
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    if options.streams:
                        _write(output.outputs[0].text)
                    final = output
        except EngineClientError:
            if options.streams and final is not None:
                _write("\n")  # the fault gets a line of its own
            raise
        assert final is not None, "a stream ended without its last output"
        if options.json:
            document = _document(llm.model.name, prompt, final)
            _write(json.dumps(document, ensure_ascii=False) + "\n")
        elif options.streams:
            _write("\n")
        else:
            for index, completion in enumerate(final.outputs):
                heading = f"--- {index} ---\n" if options.n > 1 else ""
                _write(f"{heading}{completion.text}\n")
    for completion in final.outputs:
        reason, detail = completion.finish_reason, completion.detail
        if reason in ("error", "abort", "timeout"):
            print_fault(f"the engine ended the completion ({reason}): {detail}")
            return EXIT_FAULT
        if completion.stop_reason == MAX_MODEL_LEN and params.max_tokens is not None:
            print_fault(
                f"the context of {llm.model.max_model_len} tokens is full, before --max-tokens "
                f"{params.max_tokens}; start the engine with a larger --max-model-len, if the "
                "model was made for more"
            )
    return 0


def _document(model: str, prompt: str, final: RequestOutput) -> dict[str, Any]:
    completions = [_completion_document(completion) for completion in final.outputs]
    num_prompt_tokens = len(final.prompt_token_ids)
    num_output_tokens = sum(len(completion.token_ids) for completion in final.outputs)
    engine = final.metrics.engine
    document = {
        "model": model,
        "request_id": final.metrics.engine_request_id,
        "prompt": prompt,
        **completions[0],
    }
    if len(completions) > 1:
        document["outputs"] = completions
    document["usage"] = {
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": final.num_cached_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    document["timings"] = {
        **_fields(final.metrics, "first_token_s", "last_token_s", "finished_s"),
        "engine": None if engine is None else msgspec.structs.asdict(engine),
    }
    return document


def _completion_document(completion: CompletionOutput) -> dict[str, Any]:
    document = _fields(completion, "text", "token_ids", "finish_reason", "stop_reason", "detail")
    if completion.logprobs is not None:
        document["logprobs"] = [
            _logprobs_document(token_id, entry)
            for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=False)
        ]
    return document


def _logprobs_document(token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
    sampled = entry[token_id]
    return {
        "token_id": token_id,
        "token": sampled.decoded_token,
        "logprob": sampled.logprob,
        "rank": sampled.rank,
        "top": [
            {"token_id": other, "token": top.decoded_token, "logprob": top.logprob}
            for other, top in entry.items()
        ],
    }


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
