"""A made-up decoder of layers that attend and layers that keep a state: each token adds itself to a
sum that decays. Plain torch; a block has the sum at its start, and what each token adds."""

import torch

from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys, State
from kernels.interface.operations import AttentionParams, RotaryParams

V, DECAY, HEAD = 61, 0.75, 8
KEYS = PagedKeys(1, HEAD, HEAD)
ATTENTION = AttentionParams(scale=HEAD**-0.5)


def state_of(size):
    """A sum and a row a token, each with its position."""
    return State(
        ((size,), (1,)), (torch.float32, torch.int64), ((size,), (1,)), (torch.float32, torch.int64)
    )


class StateModel:
    """`forward` reads blocks that a context names; `greedy` computes all tokens at once.
    `kept`: of each layer KEYS or `state_of(size)`."""

    supports = frozenset()

    def __init__(self, kept, size):
        generator = torch.Generator().manual_seed(3)

        def weight(*shape):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        self.spec = ModelSpec(
            layers=kept, num_query_heads=1, hidden_size=size, vocab_size=V, max_model_len=64
        )
        self._embedding = weight(V, size) * size**0.5
        self._qkv = [weight(3 * HEAD, size) for _ in kept]
        self._out = [weight(size, HEAD if each is KEYS else size) for each in kept]
        angles = torch.arange(64)[:, None] * 10.0 ** -torch.arange(0, 1, 2 / HEAD)
        self._rotary = RotaryParams(
            num_query_heads=1,
            head_size=HEAD,
            cos_sin_PD=torch.cat([angles.cos(), angles.sin()], 1),
        )

    def forward(self, token_ids_T, positions_T, context):
        x_TE = self._embedding[token_ids_T]
        for layer, kept in enumerate(self.spec.layers):
            if kept is KEYS:
                q_THD = context.ops.rotary_and_cache(
                    x_TE @ self._qkv[layer].T,
                    positions_T,
                    context.metadata[layer].slot_mapping_T,
                    context.kv_caches[layer],
                    self._rotary,
                )
                if layer == len(self.spec.layers) - 1:
                    q_THD = context.ops.take_rows(q_THD, context.output)
                    x_TE = context.ops.take_rows(x_TE, context.output)
                    context = context.behind_take_rows
                parts = context.kv_caches[layer].parts
                mixed = context.ops.paged_attention(
                    q_THD, *parts, context.metadata[layer], ATTENTION
                ).flatten(1)
            else:
                mixed = decayed_sums(x_TE, context.states[layer], context.metadata[layer])
            x_TE = torch.tanh(x_TE + mixed @ self._out[layer].T)
        return x_TE

    def compute_logits(self, hidden_RE):
        return hidden_RE @ self._embedding.T

    def greedy(self, prompt, number):
        tokens = list(prompt)
        for _ in range(number):
            x_TE = self._embedding[tokens]
            positions = torch.arange(len(tokens))
            for layer, kept in enumerate(self.spec.layers):
                if kept is KEYS:
                    q, k, v = (x_TE @ self._qkv[layer].T).split(HEAD, 1)
                    q, k = (self._rotated(part) for part in (q, k))
                    is_behind = positions > positions[:, None]
                    scores = (q @ k.T * ATTENTION.scale).masked_fill(is_behind, -torch.inf)
                    mixed = scores.softmax(-1) @ v
                else:
                    powers = (positions[:, None] - positions).clamp(min=0)
                    mixed = (DECAY**powers).tril() @ x_TE
                x_TE = torch.tanh(x_TE + mixed @ self._out[layer].T)
            tokens.append(int(self.compute_logits(x_TE[-1]).argmax()))
        return tokens[len(prompt) :]

    def _rotated(self, x_TD):
        cos, sin = self._rotary.cos_sin_PD[: len(x_TD)].chunk(2, 1)
        left, right = x_TD.chunk(2, 1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], 1)


def decayed_sums(x_TE, states, metadata):
    """The sum behind each token, of sequences in their order; the null block stays as it is."""
    sums_BE, starts_B1, rows_BSE, positions_BS1 = states
    starts, size = metadata.query_start_loc_R1.tolist(), metadata.block_size
    mixed_TE = torch.zeros_like(x_TE)
    for row, stop in enumerate(metadata.seq_lens_R.tolist()):
        table, first = metadata.block_table_RM[row], stop - (starts[row + 1] - starts[row])
        total = torch.zeros_like(x_TE[0])
        if first:
            block, begin = table[(first - 1) // size], (first - 1) // size * size
            kept = range(begin, first)
            assert [starts_B1[block, 0], *positions_BS1[block, : len(kept), 0]] == [begin, *kept]
            total = sums_BE[block].clone()
            for row_E in rows_BSE[block, : len(kept)]:
                total = DECAY * total + row_E
        for at in range(first, stop):
            block, place = table[at // size], starts[row] + at - first
            if block and at % size == 0:
                sums_BE[block], starts_B1[block] = total, at
            if block:
                rows_BSE[block, at % size], positions_BS1[block, at % size] = x_TE[place], at
            mixed_TE[place] = total = DECAY * total + x_TE[place]
    return mixed_TE
