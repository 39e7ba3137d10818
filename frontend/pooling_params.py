"""Parameters of a pooling request, as its user gives them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from frontend.errors import InvalidInput
from protocol import pooling as wire
from protocol.pooling import PoolingTask


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """vLLM's. None: as the model is configured.

    Args:
        dimensions: the vector's first numbers, of a model that was trained so (Matryoshka).
        use_activation: vectors have length 1; labels pass softmax or sigmoid.
        truncate_prompt_tokens: most tokens of a prompt, special ones included; -1: the model's
            limit. None: a longer prompt is refused.
        truncation_side: which end of the text is cut.
        task: for `encode`: "embed", "token_embed", "classify", "token_classify" or "score".
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    task: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInput: a value outside its limits."""
        kept = self.truncate_prompt_tokens
        if kept is not None and (not isinstance(kept, int) or kept == 0 or kept < -1):
            raise InvalidInput(
                f"truncate_prompt_tokens is {kept!r}, it must be at least 1, or -1 for the model's "
                "limit"
            )
        if self.truncation_side not in ("left", "right"):
            raise InvalidInput(f"truncation_side is {self.truncation_side!r}, use left or right")

    def to_wire(self, task: PoolingTask, second_segment_start: int | None) -> wire.PoolingParams:
        """Raises InvalidParameter: a value outside its limits."""
        return wire.PoolingParams(
            task=task,
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            second_segment_start=second_segment_start,
        )


PoolingParamsInput = PoolingParams | Sequence[PoolingParams] | None


def each_of(params: PoolingParamsInput, num_prompts: int) -> Sequence[PoolingParams]:
    """The parameters of each prompt. Raises InvalidInput: not as many, or of another type."""
    if not isinstance(params, Sequence):
        params = [params or PoolingParams()] * num_prompts
    for other in (each for each in params if not isinstance(each, PoolingParams)):
        raise InvalidInput(
            f"pooling_params is of type {type(other).__name__}, it must be PoolingParams"
        )
    if len(params) != num_prompts:
        raise InvalidInput(
            f"there are {num_prompts} prompts and {len(params)} pooling_params; give one per prompt"
        )
    return params
