"""What is reported of a prompt itself: log-probabilities of its tokens, or what is pooled of it."""

from engine_core.pooler_config import PoolerConfig
from protocol.explanations import WaitReason
from protocol.requests import EngineRequest
from protocol.sampling import MAX_PROMPT_LOGPROBS


class PromptReport:
    """The numbers that a runner reports of one prompt, or holds until it is computed. A request
    that is pooled ends then.
    Raises ValueError: it asks for more.

    Attributes:
        pools_all_states: what is pooled needs the hidden states of all tokens, and goes with the
            request's row.
        num_logprobs: tokens whose log-probabilities were sent; the first has none.
    """

    def __init__(self, message: EngineRequest, pooler: PoolerConfig | None) -> None:
        pooling, params = message.pooling_params, message.sampling_params
        num_tokens = len(message.prompt_token_ids)
        is_one = message.num_sequences == 1 and message.beam_search is None
        if pooling is not None and not (is_one and not message.output_token_ids):
            raise ValueError("a pooling request has one sequence and no output; send it alone")
        self.num_logprobs = 0
        self._num_logprobs_wanted = 0 if params.prompt_logprobs is None else num_tokens - 1
        self._num_logprobs_values = params.num_prompt_logprobs(num_tokens)
        self.pools_all_states, self._num_held_values = False, 0
        if pooling is not None and pooler is not None:
            self.pools_all_states = pooler.needs_all_states(pooling)
            self._num_held_values = pooler.num_held_values(pooling, num_tokens)

    @classmethod
    def of(
        cls, message: EngineRequest, pooler: PoolerConfig | None = None
    ) -> "PromptReport | None":
        """None if nothing of the prompt is reported. `pooler`: of a model that pools."""
        asked = message.pooling_params, message.sampling_params.prompt_logprobs
        return None if asked == (None, None) else cls(message, pooler)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether no cached prefix is used."""
        return self.pools_all_states or self._lacks_logprobs

    @property
    def num_values(self) -> int:
        """Numbers that the runner holds or reports, beside an answer's own."""
        return self._num_held_values + (self._num_logprobs_values if self._lacks_logprobs else 0)

    def why_wait(self, num_others: int) -> tuple[WaitReason, str] | None:
        """Why it may not start beside requests that report `num_others` numbers: what steps report
        and hold of prompts is bounded, whatever a request may ask."""
        num_own = self.num_values
        if not num_own or not num_others or num_others + num_own <= MAX_PROMPT_LOGPROBS:
            return None
        return WaitReason.PROMPT_LOGPROBS, (
            f"running requests report {num_others} log-probabilities or hidden states' numbers of "
            f"their prompts, it {num_own}; together at most {MAX_PROMPT_LOGPROBS}"
        )

    @property
    def _lacks_logprobs(self) -> bool:
        return self.num_logprobs < self._num_logprobs_wanted
