"""A made-up decoder of two layers, the first recurrent (a convolution, then the gated delta rule),
the second of attention. All that touches blocks goes through the context's operations."""

import torch

from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from kernels.interface.operations import AttentionParams, RotaryParams
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrenceShape,
    RecurrentCache,
)

V, SIZE, HEAD, HEADS = 61, 24, 8, 2
SHAPE = RecurrenceShape(
    num_key_heads=1, num_heads=HEADS, key_size=HEAD, value_size=HEAD,
    num_channels=(2 + HEADS) * HEAD, width=4, dtype=torch.float32,
)  # fmt: skip
STATE, KEYS = recurrent_state(SHAPE), PagedKeys(1, HEAD, HEAD)


class RecurrentModel:
    supports = frozenset({"drafts"})
    spec = ModelSpec(
        layers=(STATE, KEYS), num_query_heads=1, hidden_size=SIZE, vocab_size=V, max_model_len=64
    )

    def __init__(self):
        generator = torch.Generator().manual_seed(3)

        def weight(*shape):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self._embedding = weight(V, SIZE) * SIZE**0.5
        self._in = weight(SHAPE.num_channels + HEADS * HEAD + 2 * HEADS, SIZE)
        self._out = weight(SIZE, HEADS * HEAD)
        self._qkv, self._attended = weight(3 * HEAD, SIZE), weight(SIZE, HEAD)
        self._convolution = ConvolutionParams(
            shape=SHAPE, weight_WC=weight(SHAPE.num_channels, 4).T.contiguous()
        )
        self._recurrence = RecurrenceParams(
            shape=SHAPE, starts=(0, HEAD, 2 * HEAD), rate_H=torch.tensor([0.3, 1.1]),
            bias_HD=weight(HEADS, 1), rule="delta", normed=True, q_scale=HEAD**-0.5,
        )  # fmt: skip
        self._norm = GatedNormParams(
            weight_N=torch.ones(HEAD), size=HEAD, eps=1e-6, activation="silu"
        )
        self._attention = AttentionParams(scale=HEAD**-0.5)
        angles = torch.arange(64)[:, None] * 10.0 ** -torch.arange(0, 1, 2 / HEAD)
        self._rotary = RotaryParams(
            num_query_heads=1, head_size=HEAD, cos_sin_PD=torch.cat([angles.cos(), angles.sin()], 1)
        )

    def forward(self, token_ids_T, positions_T, context):
        ops = context.ops
        x_TE = self._embedding[token_ids_T]
        cache, metadata = RecurrentCache(*context.states[0]), context.metadata[0]
        mixed_TC, gate_TN, a_TH, b_TH = (x_TE @ self._in.T).split(
            [SHAPE.num_channels, HEADS * HEAD, HEADS, HEADS], 1
        )
        mixed_TC = ops.convolve(mixed_TC, self._convolution, cache, metadata)
        out_TN = ops.recur(mixed_TC, a_TH, b_TH, self._recurrence, cache, metadata)
        out_TN = ops.gated_norm(out_TN, gate_TN, self._norm)
        x_TE = torch.tanh(x_TE + out_TN @ self._out.T)
        q_THD = ops.rotary_and_cache(
            x_TE @ self._qkv.T, positions_T, context.metadata[1].slot_mapping_T,
            context.kv_caches[1], self._rotary,
        )  # fmt: skip
        q_THD, x_TE = (ops.take_rows(part, context.output) for part in (q_THD, x_TE))
        context = context.behind_take_rows
        mixed_TE = ops.paged_attention(
            q_THD, *context.kv_caches[1].parts, context.metadata[1], self._attention
        ).flatten(1)
        return torch.tanh(x_TE + mixed_TE @ self._attended.T)

    def compute_logits(self, hidden_RE):
        return hidden_RE @ self._embedding.T
