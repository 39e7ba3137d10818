"""Prompts that one engine computes and another goes on with: whether it pays, and the way."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

import msgspec

from frontend.engine.session import EngineSession
from frontend.errors import ClientClosed, EngineClientError
from frontend.output_processor import OutputProcessor
from frontend.request_state import RequestState, current_tracer
from frontend.sampling_params import RequestOutputKind, SamplingParams
from protocol.sampling import SamplingParams as WireSamplingParams

logger = logging.getLogger(__name__)

MIN_TOKENS = 128
"""Shorter prompts are soon computed."""
_HOP_S = 0.005
"""Seconds to the engine that computes the prompt, and back."""
_SMOOTHING = 0.2
_FORGETTING = 0.98
_SILENT_S = 5.0
_MAX_PREFILL_S = 120.0


class PrefillPlanner:
    """Weighs seconds of waiting, of a prompt and of the streams beside it, as they were measured:

        saved    share x tokens x prefill x streams     those streams would stand still; at least 1
        cost     queued x prefill + hop + tokens x transfer + (1 - share) x tokens x prefill

    `prefill` and `transfer` are seconds a token, `queued` the tokens before it, `share` the part of
    prompts that arrives. Nothing measured yet: it pays. Each time that it does not, what was
    measured of transfers counts a little less, so that a network that recovers is used again."""

    def __init__(self) -> None:
        self._prefill_s: float | None = None
        self._transfer_s = 0.0
        self._lost_share = 0.0

    def pays(self, num_tokens: int, *, num_streams: int, num_queued: float) -> bool:
        """
        Args:
            num_tokens: of the prompt, those that the decoding engine does not have.
            num_streams: requests on that engine.
            num_queued: tokens that wait at the engine that would compute the prompt.
        """
        if num_tokens < MIN_TOKENS:
            return False
        prefill_s = self._prefill_s
        if prefill_s is None:
            return True
        lost, prompt_s = self._lost_share, num_tokens * prefill_s
        cost_s = num_queued * prefill_s + _HOP_S + num_tokens * self._transfer_s + lost * prompt_s
        if (1 - lost) * prompt_s * max(1, num_streams) > cost_s:
            return True
        self._transfer_s *= _FORGETTING
        self._lost_share *= _FORGETTING
        return False

    def on_prefilled(self, num_tokens: int, prefill_s: float) -> None:
        """Learn from so many tokens that were computed in that time."""
        if num_tokens >= MIN_TOKENS:
            per_token_s = prefill_s / num_tokens
            before_s = per_token_s if self._prefill_s is None else self._prefill_s
            self._prefill_s = before_s + _SMOOTHING * (per_token_s - before_s)

    def on_transferred(self, num_tokens: int, num_arrived: int, transfer_s: float) -> None:
        """So many tokens' blocks were wanted, and came or were given up in that time."""
        lost_share = max(0.0, 1 - num_arrived / num_tokens)
        self._transfer_s += _SMOOTHING * (transfer_s / num_tokens - self._transfer_s)
        self._lost_share += _SMOOTHING * (lost_share - self._lost_share)


@dataclasses.dataclass(frozen=True, slots=True)
class _Prefill:
    session: EngineSession
    num_tokens: int
    task: asyncio.Task[None]


class PrefillHandoff:
    """
    Args:
        place: sends a request to an engine that decodes; what has gone wrong before costs time
            only.
    """

    def __init__(
        self,
        requests: OutputProcessor,
        *,
        place: Callable[[RequestState], None],
        now: Callable[[], float],
    ) -> None:
        self.planner = PrefillPlanner()
        self._requests = requests
        self._place = place
        self._now = now
        self.prefills: dict[RequestState, _Prefill] = {}
        self.handed_over: dict[RequestState, int] = {}
        """Tokens of the prompts whose blocks are to be fetched."""

    def begin(
        self,
        request: RequestState,
        engines: Mapping[EngineSession, int],
        decoder: EngineSession,
        num_matched: int,
    ) -> bool:
        """Whether another engine computes the prompt first; `place` is called afterwards.

        Args:
            engines: those that can, each with the number of the prompt's tokens that it has.
            decoder: the engine that would have it now, and `num_matched` tokens of its prompt.
        """
        wire = request.wire
        if wire.pooling_params or wire.sampling_params.prompt_logprobs is not None:
            return False
        queued = {each: self._num_queued(each) for each in engines}
        session = min(engines, key=lambda each: queued[each] - engines[each])
        if not self.planner.pays(
            len(wire.prompt_token_ids) - num_matched,
            num_streams=len(self._requests.in_flight(decoder)),
            num_queued=queued[session],
        ):
            return False
        task = asyncio.create_task(self._run(request, session))
        num_tokens = len(wire.prompt_token_ids) - engines[session]
        self.prefills[request] = _Prefill(session, num_tokens, task)
        return True

    def release(self, request: RequestState) -> None:
        """It is over, or not wanted any more."""
        prefill = self.prefills.pop(request, None)
        if prefill is not None:
            prefill.task.cancel()
            self._requests.remove_request(request)
        num_tokens = self.handed_over.pop(request, 0)
        timings = request.metrics.engine
        if num_tokens and timings is not None and timings.first_scheduled_s is not None:
            num_arrived = request.num_cached_tokens or 0
            self.planner.on_transferred(num_tokens, num_arrived, timings.first_scheduled_s)

    def on_lost(self, session: EngineSession) -> None:
        """Let another engine compute what this one was computing."""
        for request, prefill in list(self.prefills.items()):
            if prefill.session is session:
                prefill.task.cancel()
                self._end(request, None)

    def close(self) -> list[asyncio.Task[None]]:
        """End what is under way with ClientClosed. Returns tasks to cancel."""
        prefills, self.prefills = self.prefills, {}
        for request in prefills:
            request.fail(ClientClosed("this client was closed"))
        return [each.task for each in prefills.values()]

    def _num_queued(self, session: EngineSession) -> int:
        return sum(each.num_tokens for each in self.prefills.values() if each.session is session)

    async def _run(self, request: RequestState, session: EngineSession) -> None:
        state = self._prompt_of(request)
        source = None
        try:
            session.submit(state)
            state.observer = None  # no user sees its token
            if await self._is_computed(state, session):
                source = kv_address_of(session)
        except EngineClientError as error:
            logger.info("a prompt is computed by the engine that decodes: %s", error)
        finally:
            session.release(state)
        self._end(request, source)

    async def _is_computed(self, state: RequestState, session: EngineSession) -> bool:
        """False: the engine does not answer, or ended it for another reason."""
        deadline_s = self._now() + _MAX_PREFILL_S
        while session.silence_s() < _SILENT_S and self._now() < deadline_s:
            try:
                async with asyncio.timeout(1.0):
                    output = await state.next_output()
            except TimeoutError:
                continue
            timings = state.metrics.engine
            if timings and timings.first_token_s and timings.first_scheduled_s is not None:
                num_computed = len(state.wire.prompt_token_ids) - (state.num_cached_tokens or 0)
                prefill_s = timings.first_token_s - timings.first_scheduled_s
                self.planner.on_prefilled(num_computed, prefill_s)
            return output.outputs[0].finish_reason in ("stop", "length")
        return False

    def _prompt_of(self, request: RequestState) -> RequestState:
        """A request of its own, of which one token is sampled and dropped."""
        wire = msgspec.structs.replace(
            request.wire,
            request_id=self._requests.new_request_id(),
            sampling_params=WireSamplingParams(max_tokens=1, temperature=0.0),
            num_sequences=1,
            beam_search=None,
        )
        current_tracer.set(None)
        return RequestState(
            wire,
            SamplingParams(max_tokens=1, detokenize=False),
            prompt_text=None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            tokenizer=None,
            now=self._now,
            frames=request.frames,
        )

    def _end(self, request: RequestState, source: str | None) -> None:
        if self.prefills.pop(request, None) is None or request.finished:
            return
        request.kv_source = source
        if source is not None:
            self.handed_over[request] = len(request.wire.prompt_token_ids)
        self._place(request)


def kv_address_of(session: EngineSession) -> str | None:
    """Where this engine gives blocks away, if it computes prompts for others."""
    info = None if session.welcome is None else session.welcome.disaggregation
    return None if info is None else info.kv_address


def may_hand_over(session: EngineSession, decoder: EngineSession) -> bool:
    """Whether the second engine fetches the blocks of the first."""
    info = None if decoder.welcome is None else decoder.welcome.disaggregation
    return info is not None and kv_address_of(session) in info.kv_sources
