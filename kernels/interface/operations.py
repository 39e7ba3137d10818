"""What models and layers may ask of a backend: the `Operations` protocol and its data.

Every backend gives the results of the torch one (`kernels/torch`), which is the specification.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface.kv_cache import BlockCopier, KVCache, KVShape
from kernels.interface.lora import LoRARows, LoRAStack
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)
from kernels.interface.special_inputs import GivenRows, PositionScores
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    ExpertRouting,
    ExpertWeights,
    LinearWeight,
    WeightPacking,
    WeightPart,
)

LEAST_LENGTH = 1e-12
"""Of a vector that is divided by its length; PyTorch's `normalize`."""
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
"""GELU is of the normal distribution, or its approximation by tanh; relu2 is the square of ReLU."""


AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""In place, the sum over the ranks that share a layer -> its argument."""


@dataclass(slots=True, kw_only=True)  # some a step: frozen takes microseconds more
class AttentionMetadata:
    """A step's attention in one KV-cache group, made by `AttentionPlanner.plan` for its layers.

    Attributes:
        query_start_loc_R1: int32 [R + 1], where each request's tokens start; the last entry is T.
        seq_lens_R: int32 [R], tokens of each request including those of this step.
        block_table_RM: int32 [R, M], physical block of each logical block. Entries past the
            sequence's end, and those wholly left of the sliding window, are never used and must
            hold a block id in range (0, the null block, by convention).
        slot_mapping_T: int64 [T], `block id * block_size + offset` where each token's key and
            value are written.
        block_size: slots in a block.
        sliding_window: what the plan was made for; None is full attention.
        plan: private to the backend that made it.
        ends_T: int32 [T], behind the last position that each token sees: at least itself, never
            falling within a request; None: each is the last that it sees itself.
        num_long_prefills: of the step's requests those of `long_prefills`, or more; None: perhaps
            all but its decodes.
    """

    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    slot_mapping_T: torch.Tensor
    block_size: int
    sliding_window: int | None
    plan: object
    ends_T: torch.Tensor | None = None
    num_long_prefills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What `Operations.make_attention_planner` plans for: layers of equal heads and window.

    Attributes:
        block_size: a power of two, if the device is a GPU.
        max_num_seqs, max_num_batched_tokens: most requests and tokens of a step.
        max_model_len: most tokens of a request.
        dtype: of q.
        kv_dtype: of the cache: `dtype`, or float8_e4m3fn, bfloat16 or int8 where the backend has
            it.
        bidirectional: a query sees all keys of its sequence, or those less than `sliding_window`
            away on either side. Steps hold whole sequences.
        value_size: of values in the keys (`KVShape.values_in_keys`), and of results; None: values
            are beside the keys, as long as these.
        ignores_ends: each token sees up to itself, whatever ends a step gives.
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    sliding_window: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    bidirectional: bool = False
    value_size: int | None = None
    ignores_ends: bool = False


class AttentionPlanner(ABC):
    """Plans the attention of one KV-cache group. A plan holds until the planner's next one."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def plan(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_table_RM: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        num_decodes: int,
        num_decode_tokens: int,
        ends_T: torch.Tensor | None = None,
        num_long_prefills: int | None = None,
    ) -> AttentionMetadata:
        """The plan of a step, for all layers of the group.

        On a GPU the host reads no tensor, so that the call can be captured in a CUDA graph and
        replayed for other contents.

        Args: see AttentionMetadata. The tensors live on the backend's device and must stay
            unchanged until the step's last layer has run. R may be 0.
            num_decodes: requests [0, num_decodes) compute one token each (or none: the padding of
                a bucket, with a sequence length of 0), those after them at least 1. A backend with
                `needs_decodes_first` is slower where a request with one token comes later, and
                the last bits of such a request may differ.
            num_decode_tokens: of the first `num_decodes` requests: equal to it without drafts. 0 on
                a GPU: any of them may decode or not, as the device finds.
            ends_T: see AttentionMetadata; not of latents.
            num_long_prefills: see AttentionMetadata; for a GPU.

        Raises:
            ValueError: more requests or tokens than the planner was made for.
        """
        step = AttentionMetadata(
            query_start_loc_R1=query_start_loc_R1,
            seq_lens_R=seq_lens_R,
            block_table_RM=block_table_RM,
            slot_mapping_T=slot_mapping_T,
            block_size=self._spec.block_size,
            sliding_window=self._spec.sliding_window,
            plan=None,
            ends_T=None if self._spec.ignores_ends else ends_T,
            num_long_prefills=num_long_prefills,
        )
        step.plan = self._plan_work(step, num_decodes, num_decode_tokens)
        return step

    def plan_again(self, step: AttentionMetadata) -> None:
        """An earlier plan without decodes, whose tensors are as they were, holds again."""
        step.plan = self._plan_work(step, 0, 0)

    @abstractmethod
    def _plan_work(
        self, step: AttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> object:
        """The backend's own `AttentionMetadata.plan` for a step that has none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryParams:
    """Arguments of `Operations.rotary_and_cache` that are the same in every step.

    Attributes:
        cos_sin_PD: one row a position, cosines then sines, each rotary_size / 2 wide. Only the
            first rotary_size elements of a head turn (halves, not neighbours, form pairs).
        q_norm_weight_D, k_norm_weight_D: of the norms before the rotation; None: no norm.
        v_norm_weight_D: of the norm of values; None: no norm.
    """

    num_query_heads: int
    head_size: int
    cos_sin_PD: torch.Tensor
    q_norm_weight_D: torch.Tensor | None = None
    k_norm_weight_D: torch.Tensor | None = None
    v_norm_weight_D: torch.Tensor | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Arguments of `Operations.paged_attention` that are the same in every step.

    Attributes:
        sliding_window: that of the planner.
        sinks_H: float32, a score a head that takes part in the softmax and has no value.
        alibi_slopes_H: float32, of each head.
        distance_bias_HN: float32, N = 2 * reach + 1, what a head adds to scores of keys `reach` or
            more before the query, ..., at it, ..., `reach` or more behind it. On a CPU alone.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None
    distance_bias_HN: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """The largest distance that has a bias of its own."""
        return 0 if self.distance_bias_HN is None else self.distance_bias_HN.shape[1] // 2


class RoundedRows(NamedTuple):
    """Inputs of a product as it rounds them: [T, E], with a scale a row, or for parts of it."""

    codes_TE: torch.Tensor
    scales_TG: torch.Tensor


Activations = torch.Tensor | RoundedRows
"""The activations that a product takes."""


class InputRounding(Protocol):
    """Makes the inputs of one product, rounded as it would round them, in one kernel instead of
    two. The results have the bits of `Operations`' one after another; so have the arguments."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor]:
        """See `Operations.add_rms_norm`."""

    def gated(self, gate_up_TF2: torch.Tensor, activation: Activation) -> RoundedRows:
        """`silu_and_mul` or `gelu_tanh_and_mul`."""

    def linear(self, rows: RoundedRows) -> torch.Tensor:
        """The product itself -> [T, N]."""


class Operations(Protocol):
    """The operations of one device. Tensors live on `device`; floating dtype is the model's.

    Unless said otherwise an operation mutates none of its arguments and returns a new tensor."""

    @property
    def name(self) -> str:
        """Name of the backend, for reports: "torch-cpu"."""

    @property
    def instruction_set(self) -> str:
        """What its kernels are compiled for, or choose on this machine: "avx2", "sm_90"."""

    @property
    def build(self) -> str:
        """The build of its code: another one may round otherwise."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int:
        """Host threads that share the work of an operation."""

    def wake_threads(self) -> None:
        """A forward pass comes at once: those that sleep may wake meanwhile."""

    @property
    def needs_decodes_first(self) -> bool:
        """Whether the requests that compute one token should come first in a step."""

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        """At load time: keeps the tensor, never changed, or a copy in another layout."""

    def weight_packing(self, dtype: torch.dtype, experts: str = "") -> WeightPacking | None:
        """What packs the weights of a model in `dtype` instead of `prepare_linear` and `embedding`,
        the same at every call; None: nothing does. `experts`: asks for a layer's of that name."""

    def linear(self, x_TE: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """`x @ weight.T + bias` -> [T, N]."""

    def input_rounding(self, weight: LinearWeight) -> InputRounding | None:
        """Of a product whose inputs the kernels that make them can round; resolved at load time."""

    def lora_rows(
        self, num_slots: int, *, max_rank: int, max_num_tokens: int, dtype: torch.dtype
    ) -> LoRARows:
        """For adapters beside the products of one model in `dtype`.

        Args:
            num_slots: adapters at once; their ranks are up to `max_rank`.
            max_num_tokens: of a step.
        """

    def add_lora(self, out_TN: torch.Tensor, x_TE: torch.Tensor, stack: LoRAStack) -> torch.Tensor:
        """`out[t] += B (A x[t])` with t's adapter, in float32, in place -> out.

        Rows are those of the `begin_step` that the stack's `LoRARows` had last. A row's bits do not
        depend on the other rows where those of `linear` do not."""

    def prepare_experts(
        self,
        gate_up_XFE: torch.Tensor,
        down_XEF: torch.Tensor,
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """The experts of one layer for `mixture_of_experts`, as `prepare_linear`.
        Raises ValueError: shapes that do not fit each other.

        Args:
            gate_up_XFE: [X, 2F, E], F outputs of gate, then F of up; without a gate [X, F, E].
            down_XEF: [X, E, F].
        """

    def mixture_of_experts(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        routing: ExpertRouting,
        slot_mapping_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each token through its `top_k` likeliest experts (arXiv:1701.06538) -> [T, E].

            p = softmax(router_logits[t]) in float32, or sigmoids;  c = p + bias, of the best groups
            ids = the top_k largest c, falling, the lower id first in a tie
            w = p[ids], divided by their sum + epsilon if `renormalise`, times scale
            out[t] = sum over ranks a, in order, of w[a] * down[i] (silu(g) * u),
            g = gate[i] x[t],  u = up[i] x[t],  i = ids[a]

        Another `ExpertActivation` may be in the place of `silu(g) * u`; products may have biases.
        Rounded to the dtype of x are that (a backend may round g, u and silu(g) too), each expert's
        output, and the sum, which runs in float32. transformers rounds so too, but for the terms of
        Qwen3-MoE's sum. An expert without tokens costs nothing but its memory.

        Args:
            x_TE: float32, float16 or bfloat16, as the experts' weights.
            router_logits_TX: floating, contiguous rows.
            slot_mapping_T: the step's; a token with a slot of -1 is padding and may go to no
                expert: its result is undefined. None: no token is.
        """

    def embedding(
        self, token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight
    ) -> torch.Tensor:
        """Rows of `weight_VE` for int64 ids in [0, V), the step's tokens or positions -> [T, E].
        `weight_VE`: contiguous, or packed from one part by `WeightPacking.pack`: then the rows are
        the values that `linear` multiplies with."""

    def row_table(self, part: WeightPart, dtype: torch.dtype) -> WeightPart:
        """At load time: a table [V, N], half of a model, of which a token needs a row, where rows
        can be taken with ids of this device: in the host's memory, as it is or in `dtype`."""

    def replace_rows(self, x_TE: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        """`x[given.places] = given.rows`, in place -> x. A captured pass takes `given` from each
        step's context, so it calls this with the context's, None or not."""

    def take_rows(self, x_TE: torch.Tensor, output: OutputRows | None) -> torch.Tensor:
        """`x[output.rows]`, or x if it is None. Consumes its argument. A captured pass takes
        `output` from each step's context, so it calls this with the context's, None or not; what
        comes behind is of these rows alone, attention too."""

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

        The normalised value is rounded to the dtype of the weight before it is multiplied, and the
        product to the dtype of x: a float32 weight keeps the product in float32 (Gemma), a weight
        in the model's dtype rounds first (Llama)."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and its `rms_norm` -> (normed, new residual).

        Both arguments are consumed: the results may share their memory."""

    def layer_norm(self, x_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float) -> torch.Tensor:
        """`(x - mean(x)) / sqrt(variance(x) + eps) * weight[0] + weight[1]` over the last
        dimension, in float32 (arXiv:1607.06450). `weight_2E`: of the dtype of x, contiguous."""

    def add_layer_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and its `layer_norm` -> (normed, new residual). As `add_rms_norm`."""

    def activate(self, x_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The activation of each element. Consumes its argument."""

    def silu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`silu(left half) * right half` of [T, 2F] -> [T, F]. Consumes its argument."""

    def gelu_tanh_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`gelu(left half, tanh approximation) * right half` of [T, 2F] -> [T, F]. Consumes."""

    def gelu_and_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor:
        """`gelu(left half) * right half` of [T, 2F] -> [T, F]. Consumes its argument."""

    def reduce(self, x_TE: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        """`all_reduce(x)`, which a captured pass calls again at each run. Consumes its argument."""

    def mean_direction(self, x_TE: torch.Tensor, size: int) -> npt.NDArray[np.float32]:
        """The first `size` numbers of the rows' mean, over their length (`LEAST_LENGTH` at least):
        float32 [size], on the host. At least one row."""

    def capture(self, forward: Forward[PassResult], *, lends: bool = False) -> Forward[PassResult]:
        """A model's forward pass, which the backend may run once and replay as a captured graph.

        The results are bit for bit those of `forward`. It must do the same at every call, and with
        activations nothing but operations, `.flatten(1)`, `.clone()`, and `.mul_` with one number;
        one that does more is run as it is. `lends`: the results hold until the next call."""

    def rotary_and_cache(
        self,
        qkv_TN: torch.Tensor,
        positions_T: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache | None,
        params: RotaryParams,
    ) -> torch.Tensor:
        """Norm (if weights are given) q, k and v, rotate q and k, write k and v to the cache.
        Returns q_THD, rotated.

        Args:
            qkv_TN: [T, (H + 2K) * D], heads of q, then k, then v, which are left out where values
                are in the keys. Consumed: may be overwritten.
            positions_T: int64, each below P.
            slot_mapping_T: int64, see AttentionMetadata.
            kv_cache: written in place; its K gives the number of key/value heads. None: of a layer
                that reads another's keys and values: `qkv_TN` is q alone, and nothing is written.
        """

    def write_kv_cache(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache,
    ) -> None:
        """Write keys and values as they are to `kv_cache` at `slot_mapping_T`."""

    def read_kv_cache(
        self, kv_cache: KVCache, slots_L: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_LKD, v_LKD) of int64 `slots_L`, in the cache's dtype (int8: float32): a copy."""

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        positions: PositionScores | None = None,
    ) -> torch.Tensor:
        """Causal attention of this step's tokens over the cache, which already holds their k, v.

        A query at position p sees keys in (p - sliding_window, p], or [0, p] without a window.
        Scores are `scale * q @ k`, then `softcap * tanh(score / softcap)` if softcap is given, then
        plus `slope * (key position - query position)` if slopes are (ALiBi, arXiv:2108.12409),
        and plus `distance_bias[key position - query position]` if those are (arXiv:1910.10683).
        Query head h reads key/value head `h // (H / K)`. Returns out_THD, D the size of a value.

        Args:
            k_cache, v_cache: keys and values of the KVCache of the layer.
            metadata: planned with the same `sliding_window` and head counts.
            positions: added to scores. On a CPU alone, of a step that holds whole sequences.
        """

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        index: KVCache,
        metadata: AttentionMetadata,
        top_k: int,
    ) -> torch.Tensor:
        """The `top_k` keys that each token attends (DeepSeek sparse attention, arXiv:2512.02556).

            score[t, s] = sum over heads h of weights[t, h] * max(q[t, h] @ k[s], 0),  s <= t

        Returns int32 [T, top_k], their positions, rising; of two equal scores the earlier key.
        Undefined of a token with `top_k` keys at most, which attends all of them.

        Args:
            q_THD, weights_TH: of the indexer's heads; rows may be columns of wider tensors.
            index: `KVCache.index` of the layer, of `metadata`'s plan; holds the step's keys.
        """

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        chosen_TK: torch.Tensor,
    ) -> torch.Tensor:
        """`paged_attention` to keys that `choose_keys` chose, of values in keys. A token that sees
        K at most has the bits that it has there."""

    def make_attention_planner(self, spec: AttentionSpec) -> AttentionPlanner:
        """For one KV-cache group; allocates all memory that its plans need.
        Raises ValueError: heads, a block size or a dtype that the backend cannot take."""

    def convolve(
        self,
        x_TC: torch.Tensor,
        params: ConvolutionParams,
        cache: RecurrentCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """A convolution of each channel over the last W tokens, in float32 -> [T, C]. Keeps the
        inputs: see `kernels.interface.recurrence`. `x_TC`: may be columns of a wider tensor."""

    def recur(
        self,
        qkv_TC: torch.Tensor,
        a_TN: torch.Tensor | None,
        b_TH: torch.Tensor | None,
        params: RecurrenceParams,
        cache: RecurrentCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """A recurrent layer, in float32 -> out [T, H * P]. Keeps rows, and states at starts of
        blocks: see `kernels.interface.recurrence`.

        Args:
            a_TN: what decays are made of, [T, H] or [T, H * N]; None: they are constants.
            b_TH: how much is written, of the delta rule alone. Both may be columns of a wider
                tensor.
        """

    def gated_norm(
        self, x_TN: torch.Tensor, gate_TN: torch.Tensor, params: GatedNormParams
    ) -> torch.Tensor:
        """See `GatedNormParams`; in float32 -> [T, N]. Both may be columns of a wider tensor."""

    def gate(
        self, x_TN: torch.Tensor, gate_TN: torch.Tensor, activation: Literal["sigmoid"] | None
    ) -> torch.Tensor:
        """`x * sigmoid(gate)`, or `x * gate`, in float32 -> [T, N]. Both may be columns of a wider
        tensor, and the gate [1, N] for all tokens."""

    def make_state_planner(self, block_size: int) -> AttentionPlanner:
        """For one group of layers that keep states: what it plans is for `convolve` and `recur`."""

    def allocate_blocks(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Zeroed memory on `device`: uint8 [B, block_bytes]."""

    def view_kv_cache(self, blocks_BN: torch.Tensor, shape: KVShape) -> KVCache:
        """A layer's cache in the first bytes of blocks of `allocate_blocks`, or of columns of them
        that begin at a multiple of `LAYER_ALIGNMENT`.
        Raises ValueError: sizes that the backend's attention cannot read."""

    def make_block_copier(self, blocks_BN: torch.Tensor, num_host_blocks: int) -> BlockCopier:
        """For these blocks of `allocate_blocks`, with so many of host memory beside them,
        page-locked for a GPU. Raises MemoryError: there is not so much."""


def allocate_kv_cache(ops: Operations, num_blocks: int, shape: KVShape) -> KVCache:
    """The zeroed cache of one layer in memory of its own."""
    return ops.view_kv_cache(ops.allocate_blocks(num_blocks, shape.block_bytes), shape)


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The tokens of a step whose hidden states are read; to the others the model's last layer gives
    keys and values alone.

    Attributes:
        rows_N: int64 [N], N at least 1, rising: of some requests the last tokens.
        metadata: a plan of them alone, for the last layer.
    """

    rows_N: torch.Tensor
    metadata: AttentionMetadata


def take_rows(x_TE: torch.Tensor, output: OutputRows | None) -> torch.Tensor:
    """See `Operations.take_rows`."""
    return x_TE if output is None else x_TE[output.rows_N]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass of a model reads besides tokens and positions.

    Attributes:
        kv_caches: by layer.
        metadata: by layer; layers of one KV-cache group share an object.
        ops: the backend that made both.
        encoded: of an encoder-decoder model where each token finds its encoder's keys and values:
            a plan in which every token is a request of its own, with their number as length.
        given: on the backend's device; None: every token is embedded.
        added: rows that are added to the output of the first layers, one a layer, fewer than there
            are layers. With any, a pass is not one that was captured.
        positions_AT: int64 [3, T], positions on the axes of M-RoPE; None: those of the tokens, on
            all axes.
        output: a model may compute the hidden states of these tokens alone; None: of all.
        states: by layer, of layers that keep one, tensors [blocks, ...] (`StateShape`), see
            `kernels.interface.recurrence`. Such a layer's metadata has no plan of attention.
    """

    kv_caches: Sequence[KVCache]
    metadata: Sequence[AttentionMetadata]
    ops: Operations
    encoded: AttentionMetadata | None = None
    given: GivenRows | None = None
    added: tuple[GivenRows, ...] = ()
    positions_AT: torch.Tensor | None = None
    output: OutputRows | None = None
    states: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def behind_take_rows(self) -> ForwardContext:
        """The context for the rest of the last layer."""
        if self.output is None:
            return self
        return replace(self, metadata=[*self.metadata[:-1], self.output.metadata], output=None)


PassResult = TypeVar("PassResult", bound=torch.Tensor | tuple[torch.Tensor, ...])
Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], PassResult]
"""(int64 token ids [T], int64 positions [T], context) -> hidden_TE, or several such tensors."""
