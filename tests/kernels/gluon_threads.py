"""Runs a Gluon kernel's own source on a CPU: torch for its arithmetic, a thread for each group of
warps, barriers that count. It shows a deadlock (as an error), a stage that is filled while it is
read (as NaN: shared memory holds NaN from a copy's begin to its arrival, products read it when they
are waited for), and a wrong address. Layouts, and fences between proxies, mean nothing here."""

import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PATIENCE_S = 60.0


class Pointer:
    """Elements of a tensor's storage."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + offset)

    @classmethod
    def to(cls, tensor: torch.Tensor) -> "Pointer":
        size = tensor.untyped_storage().size() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())


class Barrier:
    """An mbarrier: a phase ends with the last of `count` arrivals."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.phase = 0

    def arrive(self, number: int = 1) -> None:
        with self.changed:
            assert 0 < number <= self.pending, "more arrivals than a phase has"
            self.pending -= number
            if not self.pending:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE_S):
                raise TimeoutError(f"nobody ends phase {self.phase} of {self.count} arrivals")


class Shared:
    """A tile of shared memory, or a stack of tiles."""

    def __init__(self, tile: torch.Tensor) -> None:
        self.tile, self.dtype = tile, tile.dtype

    def index(self, at: Any) -> "Shared":
        return Shared(self.tile[int(at)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.tile[start : start + length])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tile.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.tile.copy_(value)


class Barriers(list[Barrier]):
    def index(self, at: Any) -> Barrier:  # type: ignore[override]
        return self[int(at)]


class Product:
    """On its way: reads its operands when it is waited for."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute = compute
        self.value: torch.Tensor | None = None


_of_thread = threading.local()
_atomic = threading.Lock()


def _tensor(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=None if like is None else like.dtype)


def _load(pointer: Pointer, mask: Any = None, other: float = 0, cache_modifier: str = "") -> Any:
    at = _tensor(pointer.offset).long()
    if mask is None:
        assert (at >= 0).all(), "an address before the tensor"
        return pointer.flat[at]
    mask, at = torch.broadcast_tensors(mask, at)
    found = pointer.flat[at.where(mask, 0)]
    return found.where(mask, torch.tensor(other, dtype=found.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at = _tensor(pointer.offset).long()
    mask, at = torch.broadcast_tensors(_tensor(mask), at)
    pointer.flat[at[mask]] = _tensor(value, pointer.flat).expand(at.shape)[mask]


def _atomic_add(pointer: Pointer, value: int, **_: str) -> torch.Tensor:
    with _atomic:
        before = _load(pointer).clone()
        _store(pointer, before + value)
    return before


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _copy(to: Shared, pointer: Pointer, mask: torch.Tensor) -> None:
    to.tile.fill_(float("nan"))
    _of_thread.__dict__.setdefault("copies", []).append((to, _load(pointer, mask)))


def _copies_arrive(barrier: Barrier, increment_count: bool) -> None:
    assert not increment_count
    for to, value in _of_thread.copies:
        to.store(value)
    _of_thread.copies = []
    barrier.arrive(128)  # each thread of four warps


def _multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    def compute() -> torch.Tensor:
        left = a.tile if isinstance(a, Shared) else a
        return left.float() @ b.tile.float() + (acc if use_acc else 0)

    product = Product(compute)
    _of_thread.__dict__.setdefault("products", []).append(product)
    return product


def _wait_for_products(num_outstanding: int, deps: list[Product]) -> Any:
    products = _of_thread.products
    while len(products) > num_outstanding:
        done = products.pop(0)
        done.value = done.compute()
    known = [each if each.value is None else each.value for each in deps]
    return known[0] if len(known) == 1 else known


def _specialise(groups: Iterable[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    errors: list[Exception] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=group) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _jit(function: Any = None, **_: Any) -> Any:
    return _jit if function is None else function


def _language() -> types.ModuleType:
    gl = types.ModuleType("gluon language")
    for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"):
        setattr(gl, name, lambda *_: None)
    gl.NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *_: None)
    gl.constexpr, gl.int64, gl.float32 = object, torch.int64, torch.float32
    gl.static_range, gl.program_id = range, lambda axis: torch.tensor(_of_thread.program[axis])
    gl.static_assert = lambda *_: None
    gl.arange = lambda start, stop, layout: torch.arange(start, stop, dtype=torch.int32)
    gl.full = lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype)
    gl.expand_dims, gl.convert_layout = torch.unsqueeze, lambda value, layout: value
    gl.exp, gl.exp2, gl.log2 = torch.exp, torch.exp2, torch.log2
    gl.fma = lambda a, b, c: a * b + c
    gl.max, gl.sum = (lambda x, axis: x.amax(axis)), (lambda x, axis: x.sum(axis))
    gl.maximum = lambda a, b: torch.maximum(_tensor(a), _tensor(b))
    gl.minimum = lambda a, b: torch.minimum(_tensor(a), _tensor(b))
    gl.where = torch.where
    gl.load, gl.store, gl.atomic_add = _load, _store, _atomic_add
    gl.allocate_shared_memory, gl.warp_specialize = _allocate, _specialise
    return gl


def _hopper() -> types.ModuleType:
    hopper = types.ModuleType("gluon hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _multiply, _wait_for_products
    hopper.async_copy = types.SimpleNamespace(
        async_copy_global_to_shared=_copy, mbarrier_arrive=_copies_arrive
    )
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=_init,
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier: barrier.arrive(),
    )
    return hopper


def load(module: types.ModuleType) -> types.ModuleType:
    """The module anew, its Gluon being this file's."""
    gluon = types.ModuleType("gluon")
    gluon.jit, gluon.language = _jit, _language()
    base = "triton.experimental"
    fakes = {
        base: types.SimpleNamespace(gluon=gluon),
        f"{base}.gluon": gluon,
        f"{base}.gluon.language": gluon.language,
        f"{base}.gluon.language.nvidia.hopper": _hopper(),
    }
    path = Path(str(module.__file__))
    spec = importlib.util.spec_from_file_location(f"simulated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    simulated = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, fakes):
        spec.loader.exec_module(simulated)
    simulated.tl = types.SimpleNamespace(debug_barrier=lambda: None)
    return simulated


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Iterable[Any], *rest: Any, **constants: Any
) -> None:
    """Programs one after another, the last one first."""
    pointers = [Pointer.to(tensor) for tensor in tensors]
    for at in reversed(range(grid[0] * grid[1])):
        _of_thread.program = divmod(at, grid[1])
        kernel(*pointers, *rest, **constants)
