"""What must be true at the end of a schedule: one end of each request, and the model's tokens."""

from typing import TYPE_CHECKING
from unittest import mock

from frontend import BeamSearchParams, SamplingParams
from frontend.errors import (
    ClientClosed,
    EngineDied,
    EngineUnavailable,
    QueueFull,
    RequestRejected,
)
from frontend.fleet.engine_group import EngineGroup
from protocol.errors import ErrorCode
from protocol.sampling import sequence_seed
from tests.engine_core.scheduler.oracle import beam_answer
from tests.engine_core.scheduler.paged_model import VOCAB, log_probabilities, next_token
from tests.frontend.fake_model import TOKENIZER
from tests.simulation.clients import Asked, ClientProcess
from tests.simulation.engine_process import MAX_MODEL_LEN

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

FLOOD_MESSAGES = 2000


def judge_view(run: "Simulation", client: ClientProcess) -> None:
    """Who has missed nothing of what an engine said knows all that it holds."""
    group = client.llm.session
    if not isinstance(group, EngineGroup):
        return
    for number, session in enumerate(group.sessions):
        engine = next(each for each in run.last_lives if each.address == session._address)
        watchers = engine.publisher._watchers
        watcher = next((one for each, one in watchers.items() if each.name == client.name), None)
        if not session.is_connected or watcher is None or engine.exit_code is not None:
            continue
        is_told_all = not engine.kv_cache._pool.touched and not watcher.needs_all
        if is_told_all and watcher.number == group.view._numbers.get(number):
            run.report.num_views += 1
            keys = [*memoryview(engine.kv_cache.changes.whole().stored).cast("Q")]
            missing = [key for key in keys if not group.view.index.match([key], [number])]
            assert not missing, f"{client.name} does not know {len(missing)} of {len(keys)}"


def judge(run: "Simulation") -> None:
    """Counts for the report, and what must be true at the end of every schedule."""
    report = run.report
    run.has_losses = bool(run.num_connection_faults or run.corrupted)
    report.num_merged = sum(engine.outbox.num_backlogs for engine in run.engines)
    report.num_dropped = sum(engine.outbox.num_dropped for engine in run.engines)
    run.num_losses = len(run.engines) + run.num_connection_faults + report.num_dropped
    report.num_lives = len(run.engines)
    report.num_messages = run.network.num_messages
    report.virtual_s = run.loop.time()
    codes = [engine.exit_code for engine in run.engines]
    assert all(code in (0, 1, -9) for code in codes), codes
    assert not run.loop_errors, run.loop_errors
    num_tokens = 0
    for client in run.clients:
        if isinstance(client.llm.session, EngineGroup):
            report.num_event_gaps += sum(client.llm.session.view.num_gaps.values())
        if not client.process.is_dead:
            session = client.llm.session
            assert len(session.requests) == session.requests.num_in_flight == 0
        for asked in client.asked:
            report.num_requests += 1
            num_tokens += sum(map(len, asked.tokens))
            judge_request(run, client, asked)
        for error in client.call_errors:
            if isinstance(error, EngineUnavailable):  # asked of one that was never seen
                assert len(run.addresses) > 1, repr(error)
                continue
            is_closed = isinstance(error, ClientClosed) and client.is_closed
            assert is_closed or isinstance(error, EngineDied), repr(error)
    limit = 40 * (report.num_requests + num_tokens + 20 * len(run.clients))
    limit += int(40 * report.virtual_s)
    limit += 3 * FLOOD_MESSAGES * run.num_floods
    limit += int(10 * report.virtual_s * len(run.clients)) + 200 * len(run.engines)
    assert report.num_messages < limit, f"{report.num_messages} messages, at most {limit}"


def judge_request(run: "Simulation", client: ClientProcess, asked: Asked) -> None:
    if client.process.is_dead:
        assert asked.num_ends <= 1
    elif not asked.is_left:
        assert asked.num_ends == 1, f"{asked.name}: {asked.num_ends} terminal events"
    weights = weights_of(run, asked)
    run.report.num_new += weights is not None
    if isinstance(asked.params, BeamSearchParams):
        judge_beams(run, asked, asked.params, weights)
    for index, (tokens, reason) in enumerate(zip(asked.tokens, asked.reasons, strict=True)):
        if isinstance(asked.params, BeamSearchParams):
            break
        whole, text, why = answer(asked, asked.params, index, weights)
        what = f"{asked.name}[{index}]: {tokens} ({reason}: {asked.details.get(index)}), "
        what += f"the model says {whole} ({why})"
        assert tokens == whole[: len(tokens)], what
        if asked.params.logprobs is not None:
            judge_logprobs(asked, index, asked.params.logprobs, weights)
        if reason in ("stop", "length"):
            assert (tokens, reason) == (whole, why), what
            assert asked.texts[index] == text, f"{asked.texts[index]!r} is not {text!r}: {what}"
        elif reason == "timeout":
            assert asked.timeout_s is not None, what
            took_s = asked.ended_s - asked.at_s
            least_s = 0.9 * asked.timeout_s - run.jumped_s
            assert client.process.is_dead or took_s > least_s, what
        elif reason == "abort":
            assert asked.is_aborted or run.num_drains, what
        elif reason == "error":
            assert asked.details[index].startswith("the step failed: StepFault"), what
            assert tuple(asked.prompt) in run.poison, what
        position = run.poison.get(tuple(asked.prompt), MAX_MODEL_LEN)
        assert len(asked.prompt) + len(tokens) <= position + 1, what
    run.report.largest_gap_s = max(run.report.largest_gap_s, asked.largest_gap_s)
    run.report.num_finished += asked.error is None
    num_resumptions = asked.num_resumptions
    run.report.num_resumptions += num_resumptions
    num_losses = run.num_losses
    if run.corrupted == client.name:
        num_losses += 3 * len(client.asked)
    assert num_resumptions <= num_losses, f"{asked.name}: sent {num_resumptions} times"
    if asked.error is None:
        return
    run.report.num_errors += 1
    assert may_fail(run, client, asked, weights), f"{asked.name} failed: {asked.error!r}"


def may_fail(run: "Simulation", client: ClientProcess, asked: Asked, weights: str | None) -> bool:
    error = asked.error
    return bool(
        (
            isinstance(error, QueueFull)
            and run.config.max_queued_requests is not None
            and not any(asked.tokens)
        )
        or (isinstance(error, RequestRejected) and run.corrupted == client.name)
        or (isinstance(error, RequestRejected) and run.num_drains)
        or (  # what it had said was lost under way, and it has other weights by now
            isinstance(error, RequestRejected)
            and error.code in (ErrorCode.WRONG_STATE, ErrorCode.WEIGHTS_REFUSED)
            and run.num_rolling
            and any(asked.tokens)
            and (run.has_losses or run.report.num_dropped)
        )
        or (  # an engine with new weights was lost, and serves the old ones again
            isinstance(error, EngineDied)
            and "with another model or other weights" in str(error)
            and weights is not None
        )
        or (isinstance(error, ClientClosed) and client.is_closed)
        or (
            # what the engine had when it was told to stop, it finished, and who reads has it
            isinstance(error, EngineDied)
            and run.was_away
            and (
                asked.at_s > run.drained_s - 0.1
                or len(run.engines) > 2
                or run.has_losses
                or run.num_floods
                or run.report.num_dropped
                or any(client.name in engine.unread_by for engine in run.engines)
            )
        )
    )


def weights_of(run: "Simulation", asked: Asked) -> str | None:
    """Those that made all of its tokens, if any have."""
    for weights in run.weights[1:]:
        if isinstance(asked.params, BeamSearchParams):
            if asked.tokens and asked.tokens == beams(asked, asked.params, weights):
                return weights
        elif any(asked.tokens) and all(
            tokens == answer(asked, asked.params, index, weights)[0][: len(tokens)]
            for index, tokens in enumerate(asked.tokens)
        ):
            values = log_probabilities(asked.prompt, weights)
            first = next((each[0] for each in asked.logprobs.values() if each), {})
            is_best = list(first) == best_tokens(asked.prompt, len(first), weights)
            if is_best and all(abs(first[each].logprob - values[each]) < 1e-6 for each in first):
                return weights
    return None


def judge_logprobs(asked: Asked, index: int, wanted: int, weights: str | None) -> None:
    """The likeliest tokens of each position, in order, and their values."""
    entries = asked.logprobs.get(index, [])
    assert len(entries) == len(asked.tokens[index]), f"{asked.name}: {len(entries)} logprobs"
    for position, entry in enumerate(entries):
        prefix = [*asked.prompt, *asked.tokens[index][:position]]
        values = log_probabilities(prefix, weights)
        best = best_tokens(prefix, wanted, weights)
        assert list(entry) == best, f"{asked.name}[{index}]: {entry}, the model says {best}"
        for token, found in entry.items():
            assert abs(found.logprob - values[token]) < 1e-6, (found, values)


def judge_beams(
    run: "Simulation", asked: Asked, params: BeamSearchParams, weights: str | None
) -> None:
    is_over = asked.num_ends and asked.error is None and not asked.is_aborted
    if not is_over or (not asked.tokens and (run.num_drains or tuple(asked.prompt) in run.poison)):
        return
    expected = beams(asked, params, weights)
    assert asked.tokens == expected, (
        f"{asked.name}: {asked.tokens}, the model says {expected}; {asked.details}"
    )


def beams(asked: Asked, params: BeamSearchParams, weights: str | None) -> list[list[int]]:
    request = mock.Mock(
        sampling_params=params.sampling_params().to_wire(len(asked.prompt), MAX_MODEL_LEN),
        num_prompt_tokens=len(asked.prompt),
        prompt_token_ids=asked.prompt,
        message=mock.Mock(cache_salt=weights),
    )
    return beam_answer(request, params.to_wire(), MAX_MODEL_LEN)


def best_tokens(prefix: list[int], num_tokens: int, weights: str | None = None) -> list[int]:
    values = log_probabilities(prefix, weights)
    return sorted(range(VOCAB), key=lambda token: -values[token])[:num_tokens]


def answer(
    asked: Asked, params: SamplingParams, index: int, weights: str | None = None
) -> tuple[list[int], str, str]:
    """What the model alone says to sequence `index`: tokens, text, finish reason."""
    assert params.seed is not None
    seed = params.seed if index == 0 else sequence_seed(params.seed, index)
    tokens: list[int] = []
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    assert params.max_tokens is not None
    limit = min(params.max_tokens, MAX_MODEL_LEN - len(asked.prompt))
    while True:
        prefix = [*asked.prompt, *tokens]
        if params.logprobs is None:
            token = next_token(prefix, weights, seed)
        else:
            token = best_tokens(prefix, 1, weights)[0]
        tokens.append(token)
        if token in (params.stop_token_ids or []):
            return tokens, TOKENIZER.decode(tokens[:-1]), "stop"
        text = TOKENIZER.decode(tokens)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return tokens, text[: min(found)], "stop"
        if len(tokens) >= limit:
            return tokens, text, "length"
