"""Settings of a model's parts, as data that needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kernels.interface.recurrence import RecurrenceShape

Activation = Literal["silu", "gelu_tanh", "relu2"]
"""The activation of a feed-forward; relu2, the square of ReLU, has no gate."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What decides a table of angles.

    Attributes:
        inverse_frequencies: radians a position, for each pair of elements that turns.
        factor: on cosines and sines.
        sections: how many pairs in turn go by a token's time, its row and its column (M-RoPE,
            arXiv:2409.12191); () if all go by its position.
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor on queries that grows with their position: `1 + beta * log(1 + position // length)`
    (Llama 4's)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a router's logits choose and weigh experts: see `ExpertRouting` of the kernels.

    Attributes:
        has_bias: `e_score_correction_bias`, a number of each expert, is added to its score where
            it is chosen.
        epsilon: added to the sum of a token's weights that they are divided by.
        in_float32: logits are float32 whatever the model's dtype, if its weights are kept as
            floats: packed ones give those of its dtype.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    epsilon: float = 0.0
    scale: float = 1.0
    in_float32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """What one layer's experts are.

    Attributes:
        top_k: experts of a token.
        intermediate_size: of one expert.
        renormalise: the weights of a token's experts are made to sum to one.
        round_weights: they are rounded to the model's dtype before they are used.
        block: the part of a layer that holds router and experts.
        projections: names of an expert's gate, up and down; without gate, up and down: then
            the activation is relu2.
        latent_size: of what experts take and give, between two products; None: the hidden size.
        latent_bias: of those.
        gated: what an expert with a gate does between its products.
        has_biases: router and experts have.
        shared_size: features of the expert that every token goes through, too; None: there is
            none.
        shared_name: of that, within the layer.
        gates_shared: whether it is scaled by a gate of its own.
        here: those whose weights are here; None: all.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    round_weights: bool
    block: str
    projections: tuple[str, ...]
    router: RouterConfig = RouterConfig()
    latent_size: int | None = None
    latent_bias: bool = False
    gated: Literal["silu", "swiglu_oai", "gelu_tanh"] = "silu"
    has_biases: bool = False
    shared_size: int | None = None
    shared_name: str = "mlp.shared_expert"
    gates_shared: bool = True
    here: range | None = None


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a tensor that are of heads one after another, so many each."""

    num_heads: int
    size: int = 1


SharedRows = Mapping[str, tuple[HeadRows, ...]]
"""Rows of each tensor of a mixer that ranks share by heads, by its name within the mixer; of
`out_proj.weight` its columns. A rank has its share of heads, and one at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Residual streams of Gemma 3n, see `layers/altup.py`.

    Attributes:
        active: the stream that layers compute.
        scales_corrected: whether that, corrected, is scaled where inputs of a layer are added.
        laurel_rank: of LAuReL's two matrices.
    """

    num_streams: int
    active: int
    scales_corrected: bool
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """Embeddings per layer.

    Attributes:
        size: columns of a layer.
        vocab_size: tokens that the table has.
        given_token: whose row tokens have that are given in place of embeddings.
    """

    size: int
    vocab_size: int
    given_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Sizes of a Mamba-2 layer.

    Attributes:
        num_groups: of heads that share B and C, and within which outputs are normed.
        width: tokens that its convolution sees.
        bias, output_bias, convolution_bias: of its first product and its last, and of the
            convolution.
        normed: whether outputs are normed, and not gated alone.
        gate_first: gates come before the norm.
        ranks_a_group: ranks that share the heads of a group.
    """

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    width: int
    bias: bool
    output_bias: bool
    convolution_bias: bool
    normed: bool = True
    gate_first: bool = True
    ranks_a_group: int = 1

    @property
    def shape(self) -> RecurrenceShape:
        """The shape of its state; keys and queries are B and C, which heads of a group share."""
        return _shape(
            num_key_heads=self.num_groups,
            num_heads=self.num_heads,
            key_size=self.state_size,
            value_size=self.head_size,
            num_channels=self.num_channels,
            width=self.width,
        )

    def shared_by(self, num_ranks: int) -> Mamba2Config:
        """The sizes of one of so many ranks."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_groups=max(1, self.num_groups // num_ranks),
            ranks_a_group=max(1, num_ranks // self.num_groups),
        )

    @property
    def shared_rows(self) -> SharedRows:
        heads, values = HeadRows(self.num_heads), HeadRows(self.num_heads, self.head_size)
        groups = HeadRows(self.num_groups, self.state_size)
        channels = (values, groups, groups)
        return {
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), (values, *channels, heads)),
            **dict.fromkeys(("conv1d.weight", "conv1d.bias"), channels),
            **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
            **dict.fromkeys(("norm.weight", "out_proj.weight"), (values,)),
        }

    @property
    def inner_size(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Columns of the convolution: heads, then B and C of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Sizes of a gated delta net.

    Attributes:
        num_key_heads: heads of q and k, each of as many heads of values as the others.
        num_heads: heads of values.
        width: tokens that its convolution sees.
        is_output_tiled: whether `out_proj` reads the first head of values of every key head, then
            the second ones, as in a GGUF file, whose blocks of columns may have two of them.
    """

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    width: int
    is_output_tiled: bool = False

    @property
    def shape(self) -> RecurrenceShape:
        """The shape of its state."""
        return _shape(
            num_key_heads=self.num_key_heads,
            num_heads=self.num_heads,
            key_size=self.key_size,
            value_size=self.value_size,
            num_channels=self.num_channels,
            width=self.width,
        )

    def shared_by(self, num_ranks: int) -> DeltaNetConfig:
        """The sizes of one of so many ranks."""
        return replace(
            self,
            num_key_heads=max(1, self.num_key_heads // num_ranks),
            num_heads=self.num_heads // num_ranks,
        )

    @property
    def shared_rows(self) -> SharedRows:
        heads, values = HeadRows(self.num_heads), HeadRows(self.num_heads, self.value_size)
        keys = HeadRows(self.num_key_heads, self.key_size)
        shared = self.num_heads // self.num_key_heads
        tiled = (HeadRows(self.num_key_heads, self.value_size),) * shared
        return {
            **dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), (keys, keys, values)),
            "in_proj_z.weight": (values,),
            "out_proj.weight": (values,) if not self.is_output_tiled else tiled,
            **dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight"), (heads,)),
            **dict.fromkeys(("dt_bias", "A_log"), (heads,)),
        }

    @property
    def inner_size(self) -> int:
        """Columns of all heads of values."""
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Columns of the convolution: q, k and v."""
        return 2 * self.num_key_heads * self.key_size + self.inner_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention.

    Attributes:
        query_rank: of the vector that queries are made of; None: they are made of the input.
        rank: of the vector that keys and values are made of.
        nope_size, rope_size: of a head of queries and keys, what stays and what turns.
        value_size: of a head of values.
        pairs: neighbours turn together; else halves.
        index_heads, index_size, top_k: of an indexer and its choice; 0: all keys are attended.
    """

    num_heads: int
    query_rank: int | None
    rank: int
    nope_size: int
    rope_size: int
    value_size: int
    pairs: bool
    index_heads: int = 0
    index_size: int = 0
    top_k: int = 0

    @property
    def shared_rows(self) -> SharedRows:
        """Rows of each tensor that ranks share; the latent is made by all of them."""
        keys, turning, values = (
            HeadRows(self.num_heads, size)
            for size in (self.nope_size, self.rope_size, self.value_size)
        )
        return {
            **dict.fromkeys(("q_proj.weight", "q_b_proj.weight"), (keys, turning)),
            "k_b_proj.weight": (HeadRows(self.num_heads, self.rank),),
            **dict.fromkeys(("v_b_proj.weight", "o_proj.weight"), (values,)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionConfig:
    """Sizes of a short convolution between two gates.

    Attributes:
        width: tokens that it sees.
        bias: of its products and the convolution.
    """

    num_channels: int
    width: int
    bias: bool

    @property
    def shape(self) -> RecurrenceShape:
        """The shape of a state of a convolution's inputs alone."""
        return _shape(
            num_key_heads=0,
            num_heads=0,
            key_size=0,
            value_size=0,
            num_channels=self.num_channels,
            width=self.width,
        )

    def shared_by(self, num_ranks: int) -> ShortConvolutionConfig:
        """The sizes of one of so many ranks."""
        return replace(self, num_channels=self.num_channels // num_ranks)

    @property
    def shared_rows(self) -> SharedRows:
        channels = HeadRows(self.num_channels)
        return {
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), (channels,) * 3),
            **dict.fromkeys(("conv.weight", "conv.bias", "out_proj.weight"), (channels,)),
        }


RecurrentConfig = Mamba2Config | DeltaNetConfig | ShortConvolutionConfig


def _shape(**sizes: int) -> RecurrenceShape:
    """The shape with these sizes, in float32 whatever the model's dtype."""
    import torch

    from kernels.interface.recurrence import RecurrenceShape

    return RecurrenceShape(**sizes, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class WeightFactors:
    """A product whose inputs and outputs are multiplied by numbers that its weights leave out:
    `outputs * (W (inputs * x) + b)`.

    Attributes:
        name: of the product in checkpoints, within a layer, such as "self_attn.k_proj".
        outputs: one factor, or those of runs of outputs, as (number of outputs, factor).
    """

    name: str
    outputs: float | tuple[tuple[int, float], ...] = 1.0
    inputs: float = 1.0


@dataclass(frozen=True, slots=True)
class InterleavedRows:
    """Products whose outputs lie side by side in one tensor of a checkpoint, group by group:

        q_proj | query of head 0 | gate of head 0 | query of head 1 | gate of head 1 | ...

    Attributes:
        name: of the tensor within a layer, such as "self_attn.q_proj".
        num_groups: of rows, such as heads.
        parts: name of each product within the layer, and rows of a group that it has in each of
            its pieces.
        transposed: names of products that multiply, group by group, with the transposed rows.
        pairs: pieces of a group, by their places in it, that are rotary pairs side by side; the
            product has halves.
    """

    name: str
    num_groups: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    pairs: tuple[int, ...] = ()
    transposed: frozenset[str] = frozenset()

    @property
    def num_rows(self) -> int:
        """Rows of the tensor."""
        return self.num_groups * sum(size for _, pieces in self.parts for size in pieces)
