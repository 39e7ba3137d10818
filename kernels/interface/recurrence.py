"""Recurrent layers whose state lies in blocks: the state at each block's start, and rows since.

A head's state is S [P, N]. With decays a_t, keys k_t, queries q_t and values v_t (b_t: how much of
a value is written; only with the delta rule, arXiv:2412.06464)

    S_t = a_t S_{t-1} + u_t k_t^T    u_t = b_t (v_t - a_t S_{t-1} k_t), or b_t v_t    o_t = S_t q_t

In a block of some tokens, S_0 the state at its start and c_i the sum of log a up to its row i, that
is the same as

    u_i = b_i (v_i - e^{c_i} S_0 k_i - sum_{j<i} e^{c_i - c_j} (k_j . k_i) u_j)
    o_i = e^{c_i} S_0 q_i + sum_{j<=i} e^{c_i - c_j} (k_j . q_i) u_j
    S at its end = e^{c_end} S_0 + sum_j e^{c_end - c_j} u_j k_j^T

so that the rows (k, u, c) are read as attention reads keys and values, and the state is written
once a block. A token is taken back by dropping its row. Row i needs S_0 and the rows before it in
its block alone: steps of any sizes give the same bits.

    block   | S_0, the convolution's inputs before it | rows of its tokens: k, u, c, inputs |

A step reads the block of a request's first token, and where that is a block's first the one before
it, whose end it works out. It writes each block that its tokens touch, but for the null block, 0:
of a long step's blocks only the last and those that others may want have one. Requests are in the
order of the batch: one may start behind a block that another before it fills in the same step.

Shape suffixes: T tokens, R requests, K key heads, H heads (of values), N key size, P value size,
C channels of the convolution, W its width, B blocks, S tokens a block, M block-table width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

MOST_KEY_ELEMENTS = 256
"""Of a key of a GPU's kernels: a program holds them in registers."""
Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceShape:
    """Sizes of a recurrent layer.

    Attributes:
        num_key_heads: heads of q and k; head h of values reads number h // (H / K).
        num_heads: heads of values; 0: a layer that is a convolution alone.
        num_channels, width: of the convolution, and tokens that it sees; 0: there is none.
        dtype: of the convolution's inputs.
        decay_size: decays of a head: 1, or N (arXiv:2510.26692).
    """

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    num_channels: int
    width: int
    dtype: torch.dtype
    decay_size: int = 1

    @property
    def state_parts(self) -> tuple[Part, ...]:
        """What a block has once: states, transposed, [H, N, P], and inputs [W - 1, C]."""
        return (
            ((self.num_heads, self.key_size, self.value_size), torch.float32),
            ((max(0, self.width - 1), self.num_channels), self.dtype),
        )

    @property
    def row_parts(self) -> tuple[Part, ...]:
        """What it has of each token: keys [K, N], updates u [H, P], sums of log decays [H, 1 or N],
        inputs [C]."""
        return (
            ((self.num_key_heads, self.key_size), torch.float32),
            ((self.num_heads, self.value_size), torch.float32),
            ((self.num_heads, self.decay_size), torch.float32),
            ((self.num_channels,), self.dtype),
        )


class RecurrentCache(NamedTuple):
    """One layer's blocks, as views: the parts of one block lie side by side."""

    states_BHNP: torch.Tensor
    tails_BVC: torch.Tensor
    """The last W - 1 inputs of the convolution before the block."""
    keys_BSKN: torch.Tensor
    updates_BSHP: torch.Tensor
    decays_BSHD: torch.Tensor
    inputs_BSC: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceParams:
    """What of a recurrent layer is the same in every step.

    Attributes:
        starts: of q, of k and of v among the columns of `recur`'s first argument.
        rate_H, bias_HD: float32; log a = -rate * softplus(x + bias) of the layer's product x.
            bias_HD None: log a = -rate in every token.
        rule: what is written of a value: "delta": see the module, b = sigmoid of the layer's
            product; "discretised": b = softplus(x + bias), no delta rule (Mamba-2,
            arXiv:2405.21060); "plain": b = 1, no delta rule.
        skip_H: float32; out = o + skip * v. None: out = o.
        normed: q and k are divided by their lengths, `x / sqrt(sum(x^2) + 1e-6)`.
        q_scale: of q, after that.
    """

    shape: RecurrenceShape
    starts: tuple[int, int, int]
    rate_H: torch.Tensor
    bias_HD: torch.Tensor | None
    rule: Literal["delta", "discretised", "plain"]
    skip_H: torch.Tensor | None = None
    normed: bool = False
    q_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionParams:
    """Of each channel.

    Attributes:
        weight_WC: float32, contiguous; the last input's row is the last.
        bias_C: float32.
        silu: whether `x * sigmoid(x)` follows.
    """

    shape: RecurrenceShape
    weight_WC: torch.Tensor
    bias_C: torch.Tensor | None = None
    silu: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormParams:
    """`norm(x) * act(gate)`, or `norm(x * act(gate))` with `gate_first`; the norm is an RMS norm of
    each `size` numbers in a row, with a weight for these or for the whole row.

    Attributes:
        weight_N: float32, as wide as the row, or as `size`.
        transposed: groups of so many are written as the first group of each, then the second ones.
    """

    weight_N: torch.Tensor
    size: int
    eps: float
    activation: Literal["silu", "sigmoid"]
    gate_first: bool = False
    transposed: int = 1
