"""Hidden states in place of a prompt's tokens, and what is checked of them before any is read."""

from collections.abc import Sequence

from protocol.base import Message
from protocol.errors import InvalidParameter
from protocol.multimodal import TensorRef
from protocol.sampling import SamplingParams

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class EmbeddedSpan(Message, frozen=True):
    """Hidden states in place of the embeddings of prompt positions [start, stop): `data` is
    float32, float16 or bfloat16 of shape [stop - start, hidden size]."""

    start: int
    data: TensorRef

    @property
    def stop(self) -> int:
        return self.start + self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.data.shape[0] * self.data.shape[1] * DTYPE_BYTES[self.data.dtype]


class PromptEmbedsInfo(Message, frozen=True):
    """Limits of the hidden states that an engine takes in place of tokens."""

    hidden_size: int
    max_bytes: int
    """Most bytes of a request's hidden states."""

    def check(
        self, spans: Sequence[EmbeddedSpan], num_prompt_tokens: int, params: SamplingParams
    ) -> None:
        """What can be said without the frames of a request that has any.
        Raises InvalidParameter: with the value, the limit and the next action."""
        stop = num_bytes = 0
        for span in spans:
            shape, dtype = span.data.shape, span.data.dtype
            if dtype not in DTYPE_BYTES:
                raise InvalidParameter(
                    f"prompt_embeds has dtype {dtype!r:.40}; send one of {', '.join(DTYPE_BYTES)}"
                )
            if len(shape) != 2 or shape[0] < 1 or shape[1] != self.hidden_size:
                raise InvalidParameter(
                    f"prompt_embeds has shape {[*shape[:9]]}, it must be [at least 1, hidden size "
                    f"{self.hidden_size}]; use this model's own embeddings"
                )
            if not stop <= span.start <= span.stop <= num_prompt_tokens:
                raise InvalidParameter(
                    f"prompt_embeds has positions [{span.start}, {span.stop}) of a prompt of "
                    f"{num_prompt_tokens}, behind others that end at {stop}; give them "
                    "by rising positions, without overlap"
                )
            stop = span.stop
            num_bytes += span.num_bytes
        if num_bytes > self.max_bytes:
            raise InvalidParameter(
                f"prompt_embeds has {num_bytes} bytes, the limit is {self.max_bytes}; send fewer "
                "positions or 16-bit numbers, or start the engine with a larger "
                "--max-prompt-embeds"
            )
        if params.prompt_logprobs is not None:
            raise InvalidParameter(
                "prompt_logprobs with prompt_embeds, which have no tokens to report; omit one of "
                "them"
            )
