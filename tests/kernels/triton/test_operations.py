"""What the Triton backend chooses, plans and refuses, interpreted; its kernels have own tests."""

import pytest
import torch
from paged_steps import make_cache

from kernels.interface.operations import AttentionParams, AttentionSpec
from kernels.interface.weights import ExpertRouting, QuantisedTensor
from kernels.torch.operations import TorchOperations
from kernels.triton.attention import planner as attention_planner
from kernels.triton.linear.few_rows import FewRowsProducts
from kernels.triton.operations import TritonOperations

TORCH = TorchOperations()
TRITON = TritonOperations(torch.device("cpu"))
INVARIANT = TritonOperations(torch.device("cpu"), batch_invariant=True)
BLOCK_SIZE = 4


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def caches_of_both(num_blocks, num_kv_heads, head_size, dtype=torch.float32):
    """A cache of each backend with the same random contents: (torch, Triton)."""
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_size, dtype)
    ours, theirs = make_cache(TRITON, *shape), make_cache(TORCH, *shape)
    for part, (mine, reference) in enumerate(zip(ours.parts, theirs.parts, strict=True)):
        reference.copy_(random(*reference.shape, seed=part))
        mine.copy_(reference.transpose(1, 2))
    return theirs, ours


def planner_of(ops, heads, head_size, window=None, **options):
    return ops.make_attention_planner(
        AttentionSpec(
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            head_size=head_size,
            **{
                "block_size": BLOCK_SIZE,
                "sliding_window": window,
                "max_num_seqs": 6,
                "max_num_batched_tokens": 80,
                "max_model_len": 600,
                "dtype": torch.float32,
                "kv_dtype": torch.float32,
                **options,
            },
        )
    )


def test_products_of_few_rows_are_the_librarys_unless_ours_are_given():
    few_rows = FewRowsProducts(torch.device("cpu"))
    ops = TritonOperations(torch.device("cpu"), few_rows=few_rows)
    weight, bias = random(10, 24).half(), random(10, seed=1).half()
    prepared, x = ops.prepare_linear(weight, bias), random(17, 24, seed=2).half()
    assert torch.equal(ops.linear(x[:16], prepared), few_rows.linear(x[:16], weight, bias))
    for own, rows in ((ops, 17), (TRITON, 16)):
        expected = torch.nn.functional.linear(x[:rows], weight, bias)
        assert torch.equal(own.linear(x[:rows], prepared), expected)


def test_what_it_is():
    assert (TRITON.name, INVARIANT.name) == ("triton-cpu", "triton-cpu-batch-invariant")
    assert TRITON.device == torch.device("cpu")
    assert TRITON.needs_decodes_first and not TORCH.needs_decodes_first


@pytest.mark.parametrize("ops", [TRITON, INVARIANT])
def test_linear(ops):
    x, weight, bias = random(5, 37), random(51, 37, seed=1), random(51, seed=2)
    prepared = ops.prepare_linear(weight, bias)
    assert (prepared.num_inputs, prepared.num_outputs) == (37, 51)
    expected = TORCH.linear(x, TORCH.prepare_linear(weight.clone(), bias))
    close(ops.linear(x, prepared), expected, 1e-4)


STEPS = {
    "decodes first": [(1, 1), (1, 33), (1, 530), (9, 9), (3, 60)],
    "decodes only": [(1, 4), (1, 5), (1, 300)],
    "prefills only": [(40, 40), (2, 7)],
    "any order": [(5, 40), (1, 22), (7, 7), (1, 1)],
    "nothing": [],
}


CASES = [
    (step, *case)
    for step in STEPS
    for case in [((9, 3), None, None), ((4, 2), 7, None), ((4, 1), None, 3.0)]
]
CASES.append(("any order", (71, 1), None, None))


@pytest.mark.parametrize("ops", [TRITON, INVARIANT])
@pytest.mark.parametrize(("step", "heads", "window", "softcap"), CASES)
def test_paged_attention(ops, step, heads, window, softcap):
    requests, head_size = STEPS[step], 8
    width = max((-(-length // BLOCK_SIZE) for _, length in requests), default=1)
    num_blocks = len(requests) * width + 1
    theirs, ours = caches_of_both(num_blocks, heads[1], head_size)
    generator = torch.Generator().manual_seed(1)
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(-1, width).int()
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    num_tokens = int(starts[-1])
    longer = [i for i, (queries, _) in enumerate(requests) if queries != 1]
    num_decodes = longer[0] if longer else len(requests)
    q = random(num_tokens, *[heads[0], head_size], seed=5)
    out = []
    for backend, cache in ((ops, ours), (TORCH, theirs)):
        metadata = planner_of(backend, heads, head_size, window).plan(
            query_start_loc_R1=starts,
            seq_lens_R=torch.tensor([length for _, length in requests]).int(),
            block_table_RM=table,
            slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
        )
        out.append(
            backend.paged_attention(
                q,
                *cache.parts,
                metadata,
                AttentionParams(scale=0.3, sliding_window=window, softcap=softcap),
            )
        )
    close(*out)


def test_planners_of_one_backend_share_scratch_and_do_not_disturb_each_other():
    ops = TritonOperations(torch.device("cpu"))
    wide = planner_of(ops, (4, 2), 8)
    narrow = planner_of(ops, (4, 2), 8, window=5)
    step = {
        "query_start_loc_R1": torch.tensor([0, 1]).int(),
        "seq_lens_R": torch.tensor([300]).int(),
        "block_table_RM": torch.zeros(1, 75, dtype=torch.int32),
        "slot_mapping_T": torch.zeros(1, dtype=torch.int64),
        "num_decodes": 1,
        "num_decode_tokens": 1,
    }
    first, second = wide.plan(**step).plan, narrow.plan(**step).plan
    assert first.partial_out.data_ptr() == second.partial_out.data_ptr()
    assert first.splits_W8[:3, 1:3].tolist() == [[0, 128], [128, 256], [256, 300]]
    assert second.splits_W8[0, 1:3].tolist() == [295, 300]


def test_a_token_has_the_same_bits_as_decode_and_in_a_chunk_if_batch_invariant():
    """Of the same sequence: alone as the last token, and as the last of a chunk of 17."""
    heads, head_size, length = (6, 2), 16, 333
    _, cache = caches_of_both(90, heads[1], head_size)
    table = torch.randperm(84, generator=torch.Generator().manual_seed(2))[None].int()
    q = random(17, heads[0], head_size, seed=3)
    rows = []
    for queries in (1, 17, 5):
        metadata = planner_of(INVARIANT, heads, head_size).plan(
            query_start_loc_R1=torch.tensor([0, queries]).int(),
            seq_lens_R=torch.tensor([length]).int(),
            block_table_RM=table,
            slot_mapping_T=torch.zeros(queries, dtype=torch.int64),
            num_decodes=int(queries == 1),
            num_decode_tokens=int(queries == 1),
        )
        out = INVARIANT.paged_attention(
            q[17 - queries :].clone(),
            *cache.parts,
            metadata,
            AttentionParams(scale=0.3),
        )
        rows.append(out[-1])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_experts():
    x, router = random(5, 16), random(5, 4, seed=1)
    gate_up, down = random(4, 2 * 24, 16, seed=2) * 0.2, random(4, 16, 24, seed=3) * 0.2
    expected = TORCH.mixture_of_experts(
        x, router, TORCH.prepare_experts(gate_up, down), ExpertRouting(top_k=2, renormalise=True)
    )
    for ops in (TRITON, INVARIANT):
        prepared = ops.prepare_experts(gate_up, down)
        out = ops.mixture_of_experts(x, router, prepared, ExpertRouting(top_k=2, renormalise=True))
        close(out, expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "heads", "head_size", "words"),
    [
        ({"block_size": 24}, (4, 2), 8, "block size 24 is not a power of two; choose --block-size"),
        ({}, (4, 2), 640, "heads of 640 elements, the limit is 512"),
        ({}, (130, 1), 8, "130 query heads over 1 .* limit is 128"),
        ({}, (5, 2), 8, "must be a multiple"),
        ({"dtype": torch.float64}, (4, 2), 8, "float64 .* choose --dtype"),
        ({"kv_dtype": torch.int8}, (4, 2), 8, "int8.* choose --dtype and --kv-cache-dtype"),
    ],
)
def test_what_a_planner_cannot_take_is_refused(options, heads, head_size, words):
    with pytest.raises(ValueError, match=words):
        planner_of(TRITON, heads, head_size, **options)


def test_a_block_size_that_is_no_power_of_two_is_refused_when_the_cache_is_made():
    with pytest.raises(ValueError, match="block size 12 is not a power of two"):
        make_cache(TRITON, 3, 12, 2, 8, torch.float32)


def test_a_step_larger_than_the_planner_was_made_for_is_refused():
    planner = planner_of(TRITON, (4, 2), 8)

    def plan(requests, tokens, decodes, decode_tokens):
        planner.plan(
            query_start_loc_R1=torch.zeros(requests + 1, dtype=torch.int32),
            seq_lens_R=torch.ones(requests, dtype=torch.int32),
            block_table_RM=torch.zeros(requests, 1, dtype=torch.int32),
            slot_mapping_T=torch.zeros(tokens, dtype=torch.int64),
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
        )

    with pytest.raises(ValueError, match="7 requests, the limit is 6"):
        plan(7, 7, 7, 7)
    with pytest.raises(ValueError, match="81 prefill tokens, the limit is 80"):
        plan(1, 81, 0, 0)
    with pytest.raises(ValueError, match="2 decodes of 5 tokens"):
        plan(2, 5, 2, 5)


def test_a_float8_cache_keeps_what_float8_keeps():
    """With values that float8 has: the interpreter loses the carry of a rounding."""
    heads, head_size, length, dtype = (6, 2), 16, 21, torch.float8_e4m3fn
    ours = make_cache(TRITON, 7, BLOCK_SIZE, heads[1], head_size, dtype)
    theirs = make_cache(TORCH, 7, BLOCK_SIZE, heads[1], head_size, torch.float32)
    slots = torch.arange(4, 4 + length)
    k, v = (random(length, heads[1], head_size, seed=i).to(dtype).float() for i in (1, 2))
    TRITON.write_kv_cache(k, v, slots, ours)
    k_read, v_read = TRITON.read_kv_cache(ours, slots)
    assert k_read.dtype == v_read.dtype == dtype
    assert torch.equal(k_read.float(), k) and torch.equal(v_read.float(), v)
    TORCH.write_kv_cache(k, v, slots, theirs)
    q, out = random(length, heads[0], head_size, seed=3), []
    for backend, cache, kv_dtype in ((TRITON, ours, dtype), (TORCH, theirs, torch.float32)):
        metadata = planner_of(backend, heads, head_size, kv_dtype=kv_dtype).plan(
            query_start_loc_R1=torch.tensor([0, length]).int(),
            seq_lens_R=torch.tensor([length]).int(),
            block_table_RM=torch.arange(1, 7)[None].int(),
            slot_mapping_T=slots,
            num_decodes=0,
            num_decode_tokens=0,
        )
        out.append(backend.paged_attention(q, *cache.parts, metadata, AttentionParams(scale=0.3)))
    close(*out)


@pytest.mark.parametrize("ops", [TRITON, INVARIANT])
def test_the_padding_of_a_bucket_changes_nothing_for_the_others(ops):
    """A bucket of five for three decodes; the two behind them have no token and no length."""
    heads, head_size = (6, 2), 16
    _, cache = caches_of_both(31, heads[1], head_size)
    table = torch.arange(30).view(3, 10).int()
    lengths = [40, 1, 33]
    q = random(5, heads[0], head_size, seed=3)
    out = []
    for padding in (0, 2):
        starts = [0, 1, 2, 3, *[3] * padding]
        metadata = planner_of(ops, heads, head_size).plan(
            query_start_loc_R1=torch.tensor(starts).int(),
            seq_lens_R=torch.tensor([*lengths, *[0] * padding]).int(),
            block_table_RM=torch.cat([table, torch.zeros(padding, 10).int()]),
            slot_mapping_T=torch.zeros(3 + padding, dtype=torch.int64),
            num_decodes=3 + padding,
            num_decode_tokens=3 + padding,
        )
        out.append(
            ops.paged_attention(
                q[: 3 + padding], *cache.parts, metadata, AttentionParams(scale=0.3)
            )[:3]
        )
    assert torch.equal(*out)


@pytest.mark.parametrize(
    ("head_size", "options", "shared_kib", "words"),
    [
        (256, {}, 227, "256 elements in float32, the limit on this GPU is 128; choose --dtype bf"),
        (128, {}, 99, "128 elements in float32, the limit on this GPU is 64; choose --dtype bf"),
        (64, {"kv_dtype": torch.float8_e4m3fn}, 227, "float32 model with a KV cache of .*e4m3fn"),
    ],
)
def test_float32_that_a_gpu_has_no_room_for_is_refused_there(
    monkeypatch, head_size, options, shared_kib, words
):
    """Before anything is put on the device, which is not there."""
    monkeypatch.setattr(attention_planner, "shared_memory", lambda device: shared_kib * 1024)
    with pytest.raises(ValueError, match=words):
        planner_of(TritonOperations(torch.device("cuda:0")), (4, 2), head_size, **options)


@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_table_of_rows_is_the_files_numbers_in_the_models_dtype(is_quantised):
    """More rows than are decoded at once, and not in the file's order."""
    numbers = torch.arange(4100 * 3, dtype=torch.uint8).view(4100, 3)
    order = torch.arange(4100).flip(0)
    part = QuantisedTensor(
        "Q8", (4100, 3), {"blocks": numbers}, lambda arrays: arrays["blocks"] * 0.5, order
    )
    expected = numbers[order] * 0.5
    table = TRITON.row_table(part if is_quantised else expected, torch.float16)
    assert table.dtype == torch.float16 and torch.equal(table.float(), expected)
