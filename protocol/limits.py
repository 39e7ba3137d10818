"""What a model can serve: checked by the client before it sends and by the engine when it
receives, with the same words."""

import dataclasses
from collections.abc import Collection, Sequence

from protocol.errors import InvalidParameter, PromptTooLong
from protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """Each check raises InvalidParameter with the value, the limit and the next action."""

    max_model_len: int
    """Most tokens, prompt and output together."""
    vocab_size: int
    max_logprobs: int
    """-1 means no limit."""

    def check_prompt(self, token_ids: Sequence[int], name: str = "prompt") -> None:
        if not token_ids:
            raise InvalidParameter(f"{name} is empty; give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLong(len(token_ids), self.max_model_len, name)
        self.check_token_ids(name, token_ids)

    def check_sampling(self, params: SamplingParams) -> None:
        self.check_token_ids("stop_token_ids", params.stop_token_ids)
        self.check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self.check_token_ids("logit_bias", params.logit_bias)
        limit = self.vocab_size if self.max_logprobs < 0 else self.max_logprobs
        wanted = params.logprobs or 0
        if wanted > limit or (wanted < 0 <= self.max_logprobs):
            raise InvalidParameter(
                f"logprobs is {wanted}, the limit is {limit}; ask for fewer or start the engine "
                "with a larger --max-logprobs"
            )

    def check_token_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidParameter(
                f"{name} holds token id {wrong}, the vocabulary ends at {self.vocab_size - 1}; "
                "use this model's own tokenizer"
            )
