"""Fuzzing of what works row by row, of sampling, and of the pool."""

import ctypes

import torch

from kernels.cpu.graph_ops import ACTIVATIONS
from kernels.cpu.library import ISA_NAMES, NativeLibrary, check
from kernels.cpu.operations import CpuOperations
from kernels.interface.sampling import Penalties, SamplingLimits
from tests.kernels.cpu.fuzz.random_case import RandomCase, must_refuse


def embedding(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    weight = case.numbers(case.size(100), case.size(300))
    ids = case.integers((case.below(40),), len(weight), torch.int64)
    run.embedding(ids, weight)
    if len(ids):
        ids[case.below(len(ids))] = case.index(len(weight))
        must_refuse(f"embedding of {ids}", lambda: run.embedding(ids, weight))


def norms_and_activations(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    size = case.size(700)
    x, weight = case.strided(case.below(70), size), case.numbers(size)
    run.rms_norm(x, weight, 1e-5)
    residual = case.numbers(len(x), size)
    run.add_rms_norm(x.contiguous(), residual, weight, 1e-5)
    pair = case.numbers(2, size)
    run.layer_norm(x, pair, 1e-5)
    if len(x):
        run.mean_direction(x.contiguous(), 1 + case.below(size))
    run.add_layer_norm(x.contiguous(), residual.clone(), pair, 1e-5)
    run.activate(residual.clone(), ("gelu", "relu", "silu", "gelu_tanh")[case.below(4)])  # type: ignore[arg-type]
    both = case.numbers(len(x), 2 * size)
    run.gelu_and_mul(both)
    run.silu_and_mul(both)
    run.gelu_tanh_and_mul(both)
    p, n = ctypes.c_void_p, ctypes.c_int64
    if len(x):
        name = ("ec_add_rms_norm", "ec_add_layer_norm")[case.below(2)]
        add = library.function(name, p, p, p, n, n, ctypes.c_float)
        address = residual.data_ptr()
        must_refuse(
            "overlap",
            lambda: check(add(address, address, weight.data_ptr(), len(x), size, 1e-5)),
        )
    alone = library.function("ec_activation", p, n, n, ctypes.c_int)
    must_refuse(
        "activation", lambda: check(alone(both.data_ptr(), 1, size, case.index(len(ACTIVATIONS))))
    )
    kind = case.index(3)
    gated = library.function("ec_gated_activation", p, p, n, n, ctypes.c_int)
    addresses = both.data_ptr(), residual.data_ptr()
    must_refuse(f"activation {kind}", lambda: check(gated(*addresses, len(x), size, kind)))


def sampling(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    num_rows, size = case.below(6), case.size(2000)
    logits = case.strided(num_rows, size)
    seeds = case.integers((num_rows,), 2**62, torch.int64)
    positions = case.integers((num_rows,), 10_000, torch.int64)
    tokens = run.sample(logits, seeds, positions)
    limits = {
        "top_k_R": case.integers((num_rows,), size + 10, torch.int64),
        "top_p_R": torch.rand(num_rows).clamp(1e-6, 1),
        "min_p_R": torch.rand(num_rows) * case.below(2),
    }
    truncated = run.sample(logits, seeds, positions, SamplingLimits(**limits))
    of_a_shard = run.sample(logits, seeds, positions, first_token=case.below(2**20))
    for chosen in (tokens, truncated, of_a_shard):
        assert ((chosen >= 0) & (chosen < size)).all(), f"token {chosen} of {size}"
    if num_rows:
        limits["top_k_R"][0] = -1 - case.below(100)
        must_refuse(
            "negative top_k", lambda: run.sample(logits, seeds, positions, SamplingLimits(**limits))
        )
        run.apply_penalties(
            logits[0].contiguous(),
            case.integers((size,), 2, torch.bool),
            case.integers((size,), 3, torch.float32),
            Penalties(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3),
        )


def token_logprobs(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    num_rows, size = case.below(6), case.size(2000)
    logits = case.strided(num_rows, size)
    ids = case.integers((num_rows, case.between(1, 4)), size, torch.int64)
    num_top = case.between(0, size)
    found = run.token_logprobs(logits, ids, num_top)
    assert ((found.top_ids_RK >= 0) & (found.top_ids_RK < size)).all()
    must_refuse("too many tokens", lambda: run.token_logprobs(logits, ids, size + 1))
    if num_rows:
        ids[case.below(num_rows), 0] = case.index(size)
        must_refuse("a token outside", lambda: run.token_logprobs(logits, ids, num_top))


def threads_and_instructions(library: NativeLibrary, case: RandomCase) -> None:
    p, n = ctypes.c_void_p, ctypes.c_int64
    prove = library.function("ec_pool_prove", n, p, p)
    num_tasks = case.below(200)
    out = torch.zeros(num_tasks, dtype=torch.int64)
    seen = torch.zeros(library.num_threads, dtype=torch.int64)
    check(prove(num_tasks, out.data_ptr(), seen.data_ptr()))
    assert int(seen.sum()) == num_tasks
    show = library.function("ec_pool_show", n, p, ctypes.c_int)
    check(show(min(num_tasks, 3), out.data_ptr(), case.below(2)))
    start = library.function("ec_pool_start", ctypes.c_int, p, p, ctypes.c_int)
    must_refuse("a pool of 0", lambda: check(start(-case.below(5), None, None, 0)))
    must_refuse("too many CPUs", lambda: check(start(1, None, None, 1025 + case.below(5))))
    node = (ctypes.c_int * 1)(64 + case.below(5))
    must_refuse("a node beyond 63", lambda: check(start(1, node, node, 1)))
    force = library.function("ec_force_isa", ctypes.c_int)
    level = len(ISA_NAMES) + case.below(5)
    must_refuse(f"instruction set {level}", lambda: check(force(level)))


def tiles(library: NativeLibrary, case: RandomCase) -> None:
    p, n = ctypes.c_void_p, ctypes.c_int
    prove = library.function("ec_tiles_prove", n, n, p, p, p)
    x, w, sums = (case.integers((16, 64), 256, torch.uint8) for _ in range(3))
    addresses = x.data_ptr(), w.data_ptr(), sums.data_ptr()
    if library.isa.startswith("amx"):
        check(prove(case.below(4), 1, *addresses))
        must_refuse("a product 4", lambda: check(prove(4, 1, *addresses)))
    else:
        must_refuse("a set without tiles", lambda: check(prove(0, 1, *addresses)))
