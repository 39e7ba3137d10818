"""Attention over latents in Triton's interpreter against the loop-per-request reference."""

import pytest
import torch

from kernels.interface.kv_cache import KVShape
from kernels.interface.operations import AttentionSpec
from kernels.triton.attention import latent
from kernels.triton.device_limits import HOPPER_SHARED_BYTES, SHORT_SHARED_BYTES
from kernels.triton.operations import TritonOperations
from tests.kernels.cpu.test_latent_attention import Latents
from tests.kernels.paged_steps import reference_paged_attention

CPU = torch.device("cpu")
LENGTHS = [(7, 7), (1, 40), (5, 38), (1, 150), (3, 33), (1, 1)]
DECODES = [(s, length - 1, length) for s, (n, length) in enumerate(LENGTHS) if n == 1]
PREFILLS = [(s, length - n, length) for s, (n, length) in enumerate(LENGTHS) if n > 1]


def make(sizes, *, block_size=16, invariant=False):
    ops = TritonOperations(CPU, batch_invariant=invariant)
    case = Latents(ops, *sizes, block_size=block_size, lengths=LENGTHS)
    for blocks, rows in zip(case.table_RM.long(), case.rows, strict=True):
        at = torch.arange(len(rows))
        case.cache.keys[blocks[at // block_size], 0, at % block_size] = rows[:, -case.size :]
    return case


@pytest.mark.parametrize(
    ("sizes", "block_size", "shared", "invariant"),
    [
        ((6, 14, 10), 16, HOPPER_SHARED_BYTES, False),
        ((40, 80, 64), 64, HOPPER_SHARED_BYTES, True),
        ((20, 24, 16), 4, SHORT_SHARED_BYTES - 1, False),
        ((128, 20, 16), 16, HOPPER_SHARED_BYTES, False),
    ],
)
def test_any_step_gives_the_reference(sizes, block_size, shared, invariant, monkeypatch):
    monkeypatch.setattr(latent, "shared_memory", lambda device: shared)
    case = make(sizes, block_size=block_size, invariant=invariant)

    q, out, metadata = case.run([*DECODES, *PREFILLS], num_decodes=len(DECODES))
    keys, values = (part.nan_to_num().transpose(1, 2) for part in case.cache.parts)
    expected = reference_paged_attention(q, keys, values, metadata, case.params)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    rows, position = 0, 0
    for pieces, decodes in (([DECODES[1]], 1), (PREFILLS[1:], 0)):  # alone, or without some
        again, alone, _ = case.run(pieces, num_decodes=decodes)
        rows = len(alone)
        position = 1 if decodes else len(out) - rows
        assert torch.equal(alone, out[position : position + rows])
        assert torch.equal(again, q[position : position + rows])


def test_with_tiles_alone_a_tokens_bits_do_not_depend_on_its_chunk():
    case = make((20, 24, 16), invariant=True)

    _, out, _ = case.run([(2, 20, 38)])
    _, first, _ = case.run([(2, 20, 25)])
    _, last, _ = case.run([(2, 37, 38)], num_decodes=1)
    assert torch.equal(first, out[:5])
    assert torch.equal(last[0], out[-1])


def spec(**options):
    sizes = {"num_query_heads": 16, "num_kv_heads": 1, "head_size": 576, "value_size": 512}
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
    kept = {"block_size": 16, "sliding_window": None}
    kept |= dict.fromkeys(("dtype", "kv_dtype"), torch.bfloat16)
    return AttentionSpec(**{**sizes, **limits, **kept, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_size": 1088, "value_size": 1024}, "latents of 1024 .* limits are 512 and 64"),
        ({"kv_dtype": torch.float8_e4m3fn}, "leave --kv-cache-dtype at auto"),
        ({"num_query_heads": 256}, "the limit is 128 query heads"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TritonOperations(CPU).make_attention_planner(spec(**options))


def test_keys_of_an_indexer_are_refused():
    ops, shape = (
        TritonOperations(CPU),
        KVShape(16, 1, 24, 16, torch.bfloat16, values_in_keys=True, index_size=8),
    )
    with pytest.raises(ValueError, match="keys of an indexer are for a CPU"):
        ops.view_kv_cache(ops.allocate_blocks(2, shape.block_bytes), shape)
