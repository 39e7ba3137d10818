"""The one entrance to device operations: what models and layers may ask of a backend.

Owns the `Operations` protocol and the data that crosses it; attention and its cache, with their
data, stand in `kernels.interface.attention`. It must not know any model, the scheduler, or how a
backend works. Every backend gives the results of the torch one
(`kernels/torch`), which is the specification.

Shape suffixes: T tokens in the step, R requests, H query heads, K key/value heads, D head size,
E inputs of a layer, N outputs of a layer, F feed-forward, V vocabulary, B blocks, S slots a block,
M block-table width, P positions, X experts.

Layout of a step: the tokens of all requests lie one after another along T, and the tokens of
request r are `query_start_loc_R1[r]:query_start_loc_R1[r + 1]`. They are the last tokens of its
sequence, which is `seq_lens_R[r]` long with them:

    sequence of r   [0 ........ computed)[computed ........ seq_len)
                     in the cache         this step's tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kernels.interface.attention import (
    AttentionMetadata,
    AttentionOperations,
    AttentionPlanner,
    KVCache,
    cached_head_bytes,
)

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPacking

__all__ = [
    "AttentionMetadata",
    "AttentionPlanner",
    "ExpertWeights",
    "Forward",
    "ForwardContext",
    "KVCache",
    "LinearWeight",
    "Operations",
    "cached_head_bytes",
]


class LinearWeight(Protocol):
    """A weight in the layout its backend computes with; made by `Operations.prepare_linear`
    or by `WeightPacking.pack`."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...


class ExpertWeights(Protocol):
    """The experts of one layer in the layout of their backend; made by `prepare_experts`."""

    @property
    def num_experts(self) -> int: ...


class Operations(AttentionOperations, Protocol):
    """The operations of one device. Tensors live on `device`; floating dtype is the model's.

    Unless said otherwise an operation mutates none of its arguments and returns a new tensor.
    """

    @property
    def name(self) -> str:
        """Name of the backend, for reports: "torch-cpu"."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int:
        """Threads of the host that share the work of an operation, where the host does any."""
        ...

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        """Take a weight over for `linear`. The caller drops its own reference: a backend may keep
        the tensor itself or a copy in another layout, never both, and changes neither (so an
        embedding may be given that stays in use). Called at load time only.
        """
        ...

    def weight_packing(self, dtype: torch.dtype) -> WeightPacking | None:
        """What packs the weights of a model that computes in `dtype`, instead of `prepare_linear`
        and `embedding`; None where nothing does. The same object at every call.
        """
        ...

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """`x @ weight.T + bias` -> [T, N]."""
        ...

    def prepare_experts(self, gate_up_XFE: torch.Tensor, down_XEF: torch.Tensor) -> ExpertWeights:
        """Take the experts of one layer over for `mixture_of_experts`, as `prepare_linear` does.

        Args:
            gate_up_XFE: [X, 2F, E], F outputs of gate, then F of up.
            down_XEF: [X, E, F].

        Raises:
            ValueError: shapes that do not fit each other.
        """
        ...

    def mixture_of_experts(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        *,
        top_k: int,
        renormalise: bool,
        weights_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Each token through its `top_k` likeliest experts (arXiv:1701.06538) -> [T, E].

            p = softmax(router_logits[t]) in float32;  ids = its top_k largest, falling, the lower
            id first in a tie;  w = p[ids], divided by their sum if `renormalise`
            out[t] = sum over ranks a, in order, of w[a] * down[i] (silu(g) * u),
            g = gate[i] x[t],  u = up[i] x[t],  i = ids[a]

        Rounded to the dtype of x are `silu(g) * u` (a backend may round g, u and silu(g) too), each
        expert's output, and the sum, which runs in float32. transformers rounds so too, but for
        the terms of Qwen3-MoE's sum. An expert that nobody chose costs nothing but its memory.

        Args:
            x_TE: float32, float16 or bfloat16, as the experts' weights.
            router_logits_TX: floating, contiguous rows.
            top_k: in [1, X].
            weights_dtype: what w is rounded to: float32 (Mixtral), the model's (Qwen3-MoE).
        """
        ...

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        """Rows of `weight_VE` for int64 ids in [0, V) -> [T, E].

        Args:
            weight_VE: contiguous, or packed from one part by `WeightPacking.pack`: then the rows
                are the values that `linear` multiplies with.
        """
        ...

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

        The normalised value is rounded to the dtype of the weight before it is multiplied, and the
        product to the dtype of x: a float32 weight keeps the product in float32 (Gemma), a weight
        in the model's dtype rounds first (Llama).
        """
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and its `rms_norm` -> (normed, new residual).

        Both arguments are consumed: the results may share their memory.
        """
        ...

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`silu(left half) * right half` of [T, 2F] -> [T, F]. Consumes its argument."""
        ...

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`gelu(left half, tanh approximation) * right half` of [T, 2F] -> [T, F]. Consumes."""
        ...

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [R], the lowest id of each row's largest logit; float32 [R], that logit).

        A row that holds NaN has NaN for its largest logit, and any id.
        """
        ...

    def recorded(self, forward: Forward) -> Forward:
        """What gives the results of `forward`, a model's pass over the tokens of a step.

        A backend may run `forward` once, find out by that which operations it consists of, and from
        then on run those alone, with the bits that `forward` gives. So `forward` must do the same
        at every call, and with activations nothing but operations, `.flatten(1)`, and `.mul_` with
        one number; one that does more is run as it is.
        """
        ...

    def sample_from_all(
        self, logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """One token a row, int64 [R], each with its softmax probability.

        `argmax((logits - max) + noise)`, with standard Gumbel noise that is a function of (seed,
        position, token) alone; every backend computes the same (see `kernels.torch.sampling`).

        Args:
            logits_RV: float32.
            seeds_R: the 64 bits of each row's seed, as int64.
            positions_R: int64, index in the sequence of the token being chosen.
        """
        ...

    def sample_truncated(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        *,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
    ) -> torch.Tensor:
        """`sample_from_all` over what min_p, top_k and top_p leave, in that order.

        Args:
            top_k_R: int64, 0 for no limit; tokens that tie with the k-th stay.
            top_p_R: float32; the token that crosses p stays.
            min_p_R: float32, 0 for no limit.
        """
        ...

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        *,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
    ) -> None:
        """Penalise tokens of one row of logits in place.

        Args:
            prompt_mask_V: bool, tokens of the prompt: they count for repetition only.
            output_counts_V: float32, occurrences in the output.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass of a model reads besides tokens and positions.

    Attributes:
        kv_caches: by layer.
        metadata: by layer; layers of one KV-cache group share an object.
        ops: the backend that made both.
    """

    kv_caches: Sequence[KVCache]
    metadata: Sequence[AttentionMetadata]
    ops: Operations


Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""(int64 token ids [T], int64 positions [T], context) -> hidden_TE."""
