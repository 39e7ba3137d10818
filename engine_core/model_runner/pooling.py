"""Hidden states to vectors and labels, on the host, in float32. Both decoders' runners and that of
encoder-only models call it. A request's bits depend on its own tokens alone: states are added in
their order, however a prompt was cut into steps, and heads see one request at a time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine_core.pooler_config import PoolerConfig, PoolingType
from kernels.interface.operations import LEAST_LENGTH
from protocol.pooling import PoolingParams, PoolingTask

Float32Array = npt.NDArray[np.float32]

POOLED_NOT_FINITE = "the model's hidden states or labels are not finite numbers"


def _softmax(x: Float32Array) -> Float32Array:
    exp: Float32Array = np.exp(x - x.max(axis=-1, keepdims=True))
    exp /= exp.sum(axis=-1, keepdims=True)
    return exp


def _sigmoid(x: Float32Array) -> Float32Array:
    half: Float32Array = np.tanh(np.float32(0.5) * x)  # exp would overflow
    half += 1
    half *= 0.5
    return half


ACTIVATIONS: dict[str, Callable[[Float32Array], Float32Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "tanh": np.tanh,
}


@dataclasses.dataclass(frozen=True, slots=True)
class DenseLayer:
    """`activation(x @ weight_OI.T + bias_O)`; `activation` is one of ACTIVATIONS."""

    weight_OI: Float32Array
    bias_O: Float32Array | None = None
    activation: str = "identity"

    def __call__(self, x_I: Float32Array) -> Float32Array:
        """[I] or [N, I]."""
        out_O: Float32Array = x_I @ self.weight_OI.T
        return ACTIVATIONS[self.activation](out_O if self.bias_O is None else out_O + self.bias_O)


@dataclasses.dataclass(frozen=True, slots=True)
class Pooler:
    """
    Attributes:
        head: hidden state to labels; empty: there are none.
        projection: hidden state to vector; mostly empty.
        token_projection: a token's state to its vector; None: `projection`.
    """

    config: PoolerConfig
    head: Sequence[Callable[[Float32Array], Float32Array]] = ()
    projection: Sequence[Callable[[Float32Array], Float32Array]] = ()
    token_projection: Sequence[Callable[[Float32Array], Float32Array]] | None = None

    def is_mean_direction(self, params: PoolingParams) -> bool:
        """Whether the answer is the mean of the states, over its length, and nothing else."""
        return (
            params.task is PoolingTask.EMBED
            and self.config.seq_pooling_type is PoolingType.MEAN
            and self._is_active(params)
            and not self.projection
        )

    def _is_active(self, params: PoolingParams) -> bool:
        asked = params.use_activation
        return self.config.use_activation if asked is None else asked

    def answer(self, params: PoolingParams, x_E: Float32Array) -> Float32Array:
        """The answer for one state [E], or for tokens [N, E]."""
        layers = self.head if params.task.has_head else self.projection
        if params.task is PoolingTask.TOKEN_EMBED and self.token_projection is not None:
            layers = self.token_projection
        for layer in layers:
            x_E = layer(x_E)
        is_active = self._is_active(params)
        if not params.task.has_head:
            x_E = x_E[..., : params.dimensions]
            if is_active:
                norm = np.sqrt(np.add.reduce(x_E * x_E, axis=-1, keepdims=True))
                x_E = np.divide(x_E, np.maximum(norm, np.float32(LEAST_LENGTH)), dtype=np.float32)
            return x_E
        if self.config.returned_token_ids and params.task is PoolingTask.TOKEN_CLASSIFY:
            x_E = x_E[..., list(self.config.returned_token_ids)]
        x_E = ACTIVATIONS[self.config.label_activation](x_E) if is_active else x_E
        return x_E if self.config.special_token_ids is None else x_E[..., 0]


class PromptStates:
    """What the answer of one prompt needs, from the first chunk to the last."""

    def __init__(self, pooler: Pooler, params: PoolingParams, token_ids: Sequence[int]) -> None:
        self._pooler = pooler
        self._params = params
        self._kind = pooler.config.pooling_type(params)
        self.num_tokens = len(token_ids)
        self._answered = pooler.config.answered_tokens(params, token_ids)
        self._is_wanted: npt.NDArray[np.bool_] | None = None
        if self._kind is PoolingType.STEP and pooler.config.step_tag_id is not None:
            self._is_wanted = np.asarray(token_ids) == pooler.config.step_tag_id
        self._parts: list[Float32Array] = []

    def wanted(self, start: int, stop: int) -> tuple[int, int] | None:
        """Of positions [start, stop) those whose states are needed, maybe none; None: nothing is to
        be done."""
        is_last = stop == self.num_tokens
        match self._kind:
            case PoolingType.LAST:
                return (stop - 1, stop) if is_last else None
            case PoolingType.CLS:
                return (start, start + int(not start)) if not start or is_last else None
            case _:
                return start, stop

    def add(self, start: int, states_NE: Float32Array) -> None:
        """Take the hidden states of positions [start, start + N)."""
        if self._kind is PoolingType.MEAN:
            # one row behind the other, so that chunks change no bit
            rows_NE = np.concatenate([*self._parts, states_NE]) if self._parts else states_NE
            self._parts = [np.add.reduce(rows_NE, axis=0, keepdims=True)]
            return
        if self._is_wanted is not None:
            states_NE = states_NE[self._is_wanted[start : start + len(states_NE)]]
        self._parts.append(states_NE.copy())

    def answer(self) -> Float32Array:
        x_NE = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        if self._kind is PoolingType.MEAN:
            x_NE = np.divide(x_NE, self.num_tokens, dtype=np.float32)
        states = x_NE[self._answered] if self._params.task.of_tokens else x_NE[0]
        with np.errstate(all="ignore"):  # what is not finite is told to the request
            pooled = self._pooler.answer(self._params, states)
        return np.ascontiguousarray(pooled, np.float32)


def pool_prompt(
    pooler: Pooler, params: PoolingParams, token_ids: Sequence[int], states_NE: Float32Array
) -> Float32Array:
    """The answer of a prompt whose states are all there."""
    prompt = PromptStates(pooler, params, token_ids)
    start, stop = prompt.wanted(0, prompt.num_tokens) or (0, 0)
    prompt.add(start, states_NE[start:stop])
    return prompt.answer()


def named_answers(
    req_ids: Sequence[str], answers: Mapping[int, Float32Array]
) -> tuple[dict[str, Float32Array], dict[str, str]]:
    """Answers by request, and why others failed. Keys of `answers` are places in `req_ids`."""
    pooled, failures = {}, {}
    for place, answer in answers.items():
        if np.logical_and.reduce(np.isfinite(answer), axis=None):
            pooled[req_ids[place]] = answer
        else:
            failures[req_ids[place]] = POOLED_NOT_FINITE
    return pooled, failures
