"""How a model's hidden states become vectors and labels, resolved once at start. vLLM's names."""

import dataclasses
import enum
from collections.abc import Sequence

from protocol.errors import InvalidParameter
from protocol.pooling import MAX_POOLED_VALUES, PoolingParams, PoolingTask


class PoolingType(enum.StrEnum):
    """Of a sequence one hidden state: the first three. Of each token one: the others."""

    LAST = "LAST"
    MEAN = "MEAN"
    CLS = "CLS"
    """The first token's."""
    ALL = "ALL"
    STEP = "STEP"
    """Pool the tokens that are `step_tag_id`; all if that is None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """
    Attributes:
        tasks: what requests may ask for.
        hidden_size: of a hidden state.
        vector_size: of a vector, behind the model's dense layers if it has some.
        seq_pooling_type, tok_pooling_type: of tasks of a sequence, and of tokens.
        use_activation: where a request does not say.
        num_labels: 0: the model has no head.
        label_activation: "softmax", "sigmoid" or "identity".
        returned_token_ids: labels that are answered, by index; empty: all.
        special_token_ids: the first and the last one of a prompt, where a label of a token is its
            weight (BGE-M3): [tokens], without both. Vectors of tokens are without the first. None:
            labels of tokens are [tokens, labels], and of all.
        matryoshka_dimensions: lengths that vectors may be cut to; empty: any. None: none.
    """

    tasks: tuple[PoolingTask, ...]
    hidden_size: int
    vector_size: int
    seq_pooling_type: PoolingType = PoolingType.LAST
    tok_pooling_type: PoolingType = PoolingType.ALL
    use_activation: bool = True
    num_labels: int = 0
    label_activation: str = "softmax"
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, int] | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None

    def pooling_type(self, params: PoolingParams) -> PoolingType:
        """The pooling of this request."""
        return self.tok_pooling_type if params.task.of_tokens else self.seq_pooling_type

    def needs_all_states(self, params: PoolingParams) -> bool:
        """Whether hidden states of cached tokens would be missed."""
        return self.pooling_type(params) is not PoolingType.LAST

    def answered_tokens(self, params: PoolingParams, token_ids: Sequence[int]) -> slice:
        """The tokens of a prompt that an answer has a row for."""
        if self.special_token_ids is None:
            return slice(None)
        first, last = self.special_token_ids
        start, stop = int(token_ids[0] == first), len(token_ids)
        return slice(start, stop - int(params.task.has_head and token_ids[-1] == last))

    def num_held_values(self, params: PoolingParams, num_tokens: int) -> int:
        """Numbers that a prompt of that many tokens holds until it is computed."""
        return self.hidden_size * num_tokens if params.task.of_tokens else 0

    def check(self, params: PoolingParams, num_tokens: int) -> None:
        """Raises InvalidParameter: not with this model, or not of so long a prompt."""
        if params.task not in self.tasks:
            raise InvalidParameter(
                f"task {params.task.value} is not served: this engine's tasks are "
                f"{', '.join(self.tasks)}; ask for one of these, or start it with another model, "
                "--convert or --runner"
            )
        held = self.num_held_values(params, num_tokens)
        if held > MAX_POOLED_VALUES:
            raise InvalidParameter(
                f"{params.task.value} of {num_tokens} tokens with {self.hidden_size} numbers each "
                f"is {held}, the limit is {MAX_POOLED_VALUES}; shorten the prompt, or ask for "
                "one vector"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)

    def _check_dimensions(self, dimensions: int) -> None:
        allowed = self.matryoshka_dimensions
        if allowed is None:
            raise InvalidParameter(
                f"dimensions is {dimensions}, and this model does not say that its vectors may be "
                "cut (is_matryoshka, matryoshka_dimensions); omit it, or start the engine with "
                "--hf-overrides '{\"is_matryoshka\": true}'"
            )
        if allowed and dimensions not in allowed:
            raise InvalidParameter(
                f"dimensions is {dimensions}, this model's vectors may be cut to "
                f"{', '.join(map(str, allowed))}; ask for one of these"
            )
        if dimensions > self.vector_size:
            raise InvalidParameter(
                f"dimensions is {dimensions}, a vector has {self.vector_size}; ask for fewer"
            )
