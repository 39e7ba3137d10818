"""Fuzzing of dense products and of rows gathered from their weights: any bytes of any kind."""

import ctypes

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.cpu.library import NativeLibrary, check
from kernels.cpu.linear import NativeLinear, PackedParts
from kernels.cpu.lora import NativeLoRARows
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import FloatFormat
from kernels.cpu.weights import (
    GGUF_KINDS,
    LinearKind,
    PackedLinear,
    pack_bfloat16,
    pack_float,
    packed_linear,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.lora import LoRAPart
from kernels.interface.weights import ExpertRouting
from tests.kernels.cpu.fuzz.random_case import RandomCase, must_refuse
from tests.kernels.gguf_parts import pack_gguf

_PACKERS = (pack_float, pack_bfloat16, quantise_int8, quantise_int4)
_BLOCKS = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in GGUF_KINDS}


def random_weight(
    library: NativeLibrary,
    case: RandomCase,
    num_inputs: int | None = None,
    num_outputs: int | None = None,
) -> PackedLinear:
    """Of any kind that takes `num_inputs`; GGUF blocks are random bytes."""
    num_outputs = num_outputs or case.size(200)
    chosen = case.below(len(_PACKERS) + len(GGUF_KINDS))
    if chosen >= len(_PACKERS):
        type_name = list(GGUF_KINDS)[chosen - len(_PACKERS)]
        inputs, num_bytes = _BLOCKS[type_name]
        size = num_inputs or inputs * case.between(1, 800 // inputs)
        if size % inputs == 0:
            blocks = case.integers((num_outputs * size // inputs * num_bytes,), 256, torch.uint8)
            return pack_gguf(library, blocks.numpy(), type_name, num_outputs, size)
    size = num_inputs or case.size(1700)
    bias = case.numbers(num_outputs) if case.one_in(2) else None
    weight = torch.randn(num_outputs, size)
    return _PACKERS[chosen % len(_PACKERS)](library, weight, bias)


def packed_rows(library: NativeLibrary, case: RandomCase) -> None:
    """Rows of any type, in any order, anywhere in a weight of floats or of their kind."""
    sizes = ((1, 4), (1, 2), (1, 2), (32, 18), (32, 20), (32, 22), (32, 34))
    sizes += ((256, 144), (256, 176), (256, 210), (32, 17), (32, 32))
    sizes += ((32, 24), (32, 18), (256, 136), (256, 110), (256, 84), (256, 168))
    kinds = (None, None, None, 3, 4, 2, 2, 5, 9, 6, 8, 1, 10, 11, 12, 13, 14, 15)
    row_type = case.below(len(sizes))
    inputs, num_bytes = sizes[row_type]
    num_blocks, num_stored = case.between(1, 1000 // inputs), case.size(100)
    num_inputs, row_bytes = num_blocks * inputs, num_blocks * num_bytes
    rows = case.integers((num_stored, row_bytes), 256, torch.uint8)
    ordered = case.one_in(2)
    num_rows = case.between(0, 150 if ordered else num_stored)
    order = case.integers((num_rows,), num_stored, torch.int64)
    first = case.below(70)
    num_outputs = first + num_rows + case.between(1, 40)
    kind = kinds[row_type]
    if kind is None or (row_type < 11 and case.one_in(2)):  # others become no floats
        kind = (LinearKind.F32, LinearKind.BF16)[case.below(2)]
    size = ctypes.c_int64()
    p, n = ctypes.c_void_p, ctypes.c_int64
    size_of = library.function("ec_linear_bytes", n, n, n, p)
    check(size_of(kind, num_outputs, num_inputs, ctypes.addressof(size)))
    blob = case.integers((size.value + 64,), 256, torch.uint8)
    blob = blob[-blob.data_ptr() % 64 :][: size.value]
    scales = torch.ones(-(-num_outputs // 32) * 32) if kind == LinearKind.I8_ROW else None
    weight = packed_linear(library, LinearKind(kind), num_outputs, num_inputs, blob, None, scales)
    run = library.function("ec_pack_rows", p, n, n, n, p, n, n, p)

    def pack(**wrong: int) -> None:
        sizes = {"type": row_type, "stored": num_stored, "bytes": row_bytes}
        a = sizes | {"rows": num_rows, "first": first} | wrong
        where = order.data_ptr() if ordered else None
        source = rows.data_ptr(), a["type"], a["stored"], a["bytes"], where, a["rows"]
        check(run(*source, a["first"], weight.address))

    pack()
    must_refuse("no such kind", lambda: check(size_of(99, 1, 1, ctypes.addressof(size))))
    must_refuse("a row type", lambda: pack(type=case.index(len(sizes))))
    must_refuse("rows of other bytes", lambda: pack(bytes=row_bytes + 1))
    must_refuse("too many outputs", lambda: pack(first=num_outputs - num_rows + 1))
    must_refuse("an output before the first", lambda: pack(first=-1))
    if num_rows:
        order[case.below(num_rows)] = case.index(num_stored)
        must_refuse("rows that are not there", lambda: pack(stored=num_stored if ordered else 0))


def linear(library: NativeLibrary, case: RandomCase) -> None:
    run = NativeLinear(library)
    weight = random_weight(library, case)
    x = case.strided(case.below(60), weight.num_inputs)
    out = run(x, weight)
    if len(x):
        row = case.below(len(x))
        alone = run(x[row : row + 1], weight)[0]
        if not torch.equal(alone.view(torch.int32), out[row].view(torch.int32)):
            same = torch.allclose(alone, out[row], rtol=0, atol=0, equal_nan=True)
            assert same, f"row {row} of {len(x)} has other bits alone ({weight.kind.name})"
    run(x, PackedParts((weight, random_weight(library, case, weight.num_inputs))))


def wrong_linear(library: NativeLibrary, case: RandomCase) -> None:
    weight = random_weight(library, case)
    arguments = weight.arguments
    field, value = (
        ("kind", (-1, 8, 2**31 - 1)[case.below(3)]),
        ("num_outputs", (0, -1, 2**62, weight.num_outputs + 32)[case.below(4)]),
        ("num_inputs", (0, -1, 2**62, weight.num_inputs + 256)[case.below(4)]),
        ("blob_bytes", (0, -1, weight.num_bytes + 1)[case.below(3)]),
        ("blob", (None, weight.blob.data_ptr() + case.between(1, 63))[case.below(2)]),
    )[case.below(5)]
    right = getattr(arguments, field)
    setattr(arguments, field, value)
    run = NativeLinear(library)
    x = case.numbers(2, weight.num_inputs)
    must_refuse(f"linear with {field} {value}", lambda: run(x, weight))
    ids = torch.zeros(1, dtype=torch.int64)
    must_refuse(f"gather with {field} {value}", lambda: run.gather_rows(ids, weight))
    verify = library.function("ec_linear_check", ctypes.c_void_p)
    must_refuse(f"check with {field} {value}", lambda: check(verify(weight.address)))
    setattr(arguments, field, right)


def gather(library: NativeLibrary, case: RandomCase) -> None:
    run = NativeLinear(library)
    weight = random_weight(library, case)
    ids = case.integers((case.below(50),), weight.num_outputs, torch.int64)
    run.gather_rows(ids, weight)
    if len(ids):
        ids[case.below(len(ids))] = case.index(weight.num_outputs)
        must_refuse(f"gather of {ids}", lambda: run.gather_rows(ids, weight))


def quantised_activations(library: NativeLibrary, case: RandomCase) -> None:
    num_rows, num_inputs = case.below(5), case.size(300)
    groups = -(-num_inputs // 32)
    x = case.numbers(num_rows, num_inputs)
    codes = torch.empty(num_rows, groups * 32, dtype=torch.int8)
    scales = torch.empty(num_rows, groups)
    p, n = ctypes.c_void_p, ctypes.c_int64
    run = library.function("ec_quantise_activations", p, n, n, p, p)
    addresses = codes.data_ptr(), scales.data_ptr()
    check(run(x.data_ptr(), num_rows, num_inputs, *addresses))
    must_refuse("no inputs", lambda: check(run(x.data_ptr(), 1, 0, *addresses)))


def experts(library: NativeLibrary, case: RandomCase) -> None:
    """Any experts here of those that are routed to; a row of the result is the same alone."""
    num_experts, width, features = case.between(1, 12), case.size(130), case.size(90)
    first = case.below(num_experts)
    here = case.between(1, num_experts - first)
    formats: tuple[FloatFormat, ...] = ("float32", "bfloat16", "int8", "int4")
    ops = CpuOperations(library, linear_weights=formats[case.below(4)])
    layer = ops.prepare_experts(
        torch.randn(here, 2 * features, width), torch.randn(here, width, features)
    )
    x, logits = (case.numbers(case.below(120), width), case.numbers(120, num_experts))
    logits = logits[: len(x)].clone()
    top_k = case.between(1, num_experts)
    renormalise = case.one_in(2)

    def run(rows: slice, top_k: int, first: int) -> torch.Tensor:
        routing = ExpertRouting(top_k=top_k, renormalise=renormalise, first_expert=first)
        return ops.mixture_of_experts(x[rows].clone(), logits[rows].clone(), layer, routing)

    out = run(slice(None), top_k, first)
    if len(x):
        row = case.below(len(x))
        alone = run(slice(row, row + 1), top_k, first)[0]
        same = torch.allclose(alone, out[row], rtol=0, atol=0, equal_nan=True)
        assert same, f"row {row} of {len(x)} has other bits alone"
    must_refuse("more experts a token than there are", lambda: run(slice(None), 13, first))
    must_refuse("no experts a token", lambda: run(slice(None), 0, first))
    outside = (-1, num_experts - here + 1)[case.below(2)]
    must_refuse("experts that are none", lambda: run(slice(None), top_k, outside))


def lora(library: NativeLibrary, case: RandomCase) -> None:
    """Adapters of any ranks beside some parts of a product, in some slots; some rows have none."""
    num_slots, num_inputs = case.between(1, 4), case.size(300)
    part_sizes = [case.size(150) for _ in range(case.between(1, 3))]
    rows = NativeLoRARows(library, num_slots)
    stack = rows.make_stack(num_inputs, part_sizes)
    for slot in range(num_slots):
        parts = {
            number: LoRAPart(case.numbers(rank, num_inputs), case.numbers(part_sizes[number], rank))
            for number in range(len(part_sizes))
            if case.below(3)
            for rank in (case.size(40),)
        }
        if parts:
            stack.place(slot, stack.prepare(parts))
    x = case.strided(case.below(120), num_inputs)
    slots = case.integers((len(x),), num_slots + 1, torch.int32) - 1  # -1: none
    if case.one_in(2):
        slots = slots.sort().values
    out = case.strided(len(x), sum(part_sizes))
    before = out.clone()

    def add(slots_T: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        rows.begin_step(slots_T.numpy())
        return stack.add(to, of)

    add(slots, out, x)
    if len(x):
        row = slice(start := case.below(len(x)), start + 1)
        alone = add(slots[row], before[row], x[row])
        same = torch.allclose(alone, out[row], rtol=0, atol=0, equal_nan=True)
        assert same, f"row {start} of {len(x)} has other bits alone"
        slots[start] = num_slots + case.below(9)
        must_refuse(f"adapter slots {slots}", lambda: add(slots, out, x))
    more = torch.zeros(len(x) + 1, dtype=torch.int32)
    must_refuse("a segment behind the rows", lambda: add(more, out, x))
