"""Records the operations of a forward pass on what stands for tensors of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn, cast

import torch

from kernels.cpu.attention import NativeAttentionPlan
from kernels.cpu.graph_ops import GraphOp, GraphOpKind

_FLOAT_BYTES = 4

_OF_ALL_TOKENS = {
    GraphOpKind.EMBEDDING,
    GraphOpKind.EMBEDDING_PACKED,
    GraphOpKind.EMBEDDING_AT,
    GraphOpKind.GIVEN_ROWS,
    GraphOpKind.ROTARY,
}
"""Operations that read of the step what each token has."""


class NotCapturable(Exception):
    """The forward pass does something that no `GraphOp` does; the text says what."""


class Placeholder:
    """Stands for a tensor of the step; any other use of a tensor is not capturable."""

    def __init__(self, capture: OpRecorder) -> None:
        self.capture = capture

    def __getattr__(self, name: str) -> NoReturn:
        raise NotCapturable(f"it uses `.{name}` of a tensor of the step")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> object:
        if function is torch.cat and arguments[1:] == (1,) and not keywords:
            return concatenated(arguments[0])
        raise NotCapturable(f"it calls {function.__name__} with a tensor of the step")


def _refuse_operator(name: str) -> None:
    def refuse(self: Placeholder, *others: object) -> NoReturn:
        raise NotCapturable(f"it uses `{name}` of a tensor of the step")

    setattr(Placeholder, name, refuse)


# Python looks these up on the class, not through __getattr__
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    for _prefix in ("", "r", "i"):
        _refuse_operator(f"__{_prefix}{_name}__")
for _name in ("neg", "invert", "lt", "le", "gt", "ge", "getitem", "setitem", "len", "iter", "bool"):
    _refuse_operator(f"__{_name}__")


class _Memory:
    """[capacity, size] floats; a later activation uses them again when this object is gone."""

    def __init__(self, free: dict[int, list[torch.Tensor]], capacity: int, size: int) -> None:
        self._unused = free.setdefault(size, [])
        if not self._unused:
            self._unused.append(torch.empty(capacity, size, dtype=torch.float32))
        self.tensor = self._unused.pop()
        self.is_skipped = False

    def __del__(self) -> None:
        self._unused.append(self.tensor)


class Activation(Placeholder):
    """Stands for an activation [T, *tail]. `stride`: floats from a token's row to the next, in
    which it begins at `column`."""

    def __init__(
        self,
        capture: OpRecorder,
        memory: _Memory,
        tail: tuple[int, ...],
        stride: int,
        column: int = 0,
    ) -> None:
        super().__init__(capture)
        self.column = column
        self.memory = memory
        self.tail = tail
        self.stride = stride

    @property
    def address(self) -> int:
        """The address of the first token's row."""
        return self.rows.data_ptr() + self.column * _FLOAT_BYTES

    @property
    def rows(self) -> torch.Tensor:
        """[capacity, size]. Raises NotCapturable: the pass may skip writing them."""
        if self.memory.is_skipped:
            raise NotCapturable("it uses a product again behind its gated activation")
        return self.memory.tensor

    def flatten(self, start: int) -> Activation:
        """[T, H, D] -> [T, H * D]."""
        size = math.prod(self.tail)
        if start != 1:
            raise NotCapturable(f"it flattens {self.tail} from dimension {start} on")
        return Activation(self.capture, self.memory, (size,), self.stride, self.column)

    def view(self, rows: int, *sizes: int) -> Activation:
        """[T, H * D] -> [T, H, D]."""
        if rows != -1 or self.tail != (math.prod(sizes),):
            raise NotCapturable(f"it views {self.tail} as {sizes}")
        return Activation(self.capture, self.memory, sizes, self.stride, self.column)

    def split(self, sizes: Sequence[int], dim: int) -> list[Activation]:
        """[T, N] -> columns of it, as wide as `sizes` say."""
        if dim != 1 or self.tail != (sum(sizes),):
            raise NotCapturable(f"it splits {self.tail} into {[*sizes]} along dimension {dim}")
        starts = accumulate(sizes, initial=self.column)
        return [
            Activation(self.capture, self.memory, (size,), self.stride, start)
            for size, start in zip(sizes, starts, strict=False)
        ]

    def repeat_interleave(self, repeats: int, dim: int) -> Activation:
        """[T, N] -> [T, N * repeats], each column so many times."""
        if dim != 1 or len(self.tail) != 1:
            raise NotCapturable(f"it repeats {self.tail} along dimension {dim}")
        out, add, kind = (
            self.capture.new(self.tail[0] * repeats),
            self.capture.add,
            GraphOpKind.COPY,
        )
        for column, start in enumerate(range(0, out.stride, repeats)):
            source = Activation(self.capture, self.memory, (1,), self.stride, self.column + column)
            add(kind, subject=source, out=out, column=start, size=1)
            source = Activation(self.capture, out.memory, (repeats,), out.stride, start)
            for there in (1 << power for power in range((repeats - 1).bit_length())):
                size = min(there, repeats - there)  # twice as many each time
                add(kind, subject=source, out=out, column=start + there, size=size)
        return out

    def contiguous(self) -> Activation:
        """A copy without gaps between rows, in memory of its own."""
        size = math.prod(self.tail)
        out = self.capture.new(size)
        self.capture.add(GraphOpKind.COPY, subject=self, out=out, size=size)
        return Activation(self.capture, out.memory, self.tail, size)

    def mul_(self, factor: object) -> Activation:
        """Multiply by one number, in place."""
        if not isinstance(factor, torch.Tensor) or factor.numel() != 1 or not self.is_dense_row:
            raise NotCapturable("it multiplies an activation with more than one number")
        size, number = self.stride, float(factor)
        return self.capture.add(GraphOpKind.SCALE, out=self, size=size, number=number)

    def add_(self, other: object) -> Activation:
        """Add another activation, in place."""
        added, size = as_activation(other), self.stride
        if not self.is_dense_row or not added.is_dense_row or added.tail != self.tail:
            raise NotCapturable(f"it adds {added.tail} to {self.tail}")
        return self.capture.add(GraphOpKind.ADD, subject=added, out=self, size=size)

    def clone(self) -> Activation:
        """A copy of what it holds now, in memory of its own."""
        if not self.is_dense_row:
            raise NotCapturable(f"it copies {self.tail}")
        out, size = self.capture.new(self.stride), self.stride
        return self.capture.add(GraphOpKind.COPY, subject=self, out=out, size=size)

    @property
    def is_dense_row(self) -> bool:
        """[T, size], with nothing between rows."""
        return self.tail == (self.stride,)


def concatenated(parts: list[object]) -> Activation:
    """`torch.cat` of rows, along dimension 1."""
    rows = [as_activation(part) for part in parts]
    out, column = rows[0].capture.new(sum(map(width_of, rows))), 0
    for part in rows:
        size = width_of(part)
        out.capture.add(GraphOpKind.COPY, subject=part, out=out, column=column, size=size)
        column += size
    return out


class OpRecorder:
    """The operations of a pass, in order, and the memory of its activations.

    Attributes:
        ops: as the library reads them.
        takes_rows: activations from here on are of the rows that the step puts out.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: dict[int, list[torch.Tensor]] = {}
        self.ops: list[GraphOp] = []
        self.takes_rows = False

    def new(self, size: int) -> Activation:
        """An activation [T, size]."""
        return Activation(self, _Memory(self._free, self._capacity, size), (size,), size)

    def add(
        self,
        kind: GraphOpKind,
        *,
        out: Activation,
        size: int,
        subject: Activation | None = None,
        operand: int = 0,
        plan: NativeAttentionPlan | None = None,
        column: int = 0,
        stride: int = 0,
        number: float = 0.0,
    ) -> Activation:
        """One operation, which writes `out` from `column` on; returns `out`.

        `stride` only where there is no subject to have one."""
        if self.takes_rows and kind in _OF_ALL_TOKENS:
            raise NotCapturable(f"it does {kind.name} behind the choice of rows")
        self.ops.append(
            GraphOp(
                kind=kind,
                subject=None if subject is None else subject.address,
                operand=operand,
                out=out.address + column * _FLOAT_BYTES,
                geometry=None if plan is None else plan.address,
                stride=stride if subject is None else subject.stride,
                out_stride=out.stride,
                size=size,
                number=number,
            )
        )
        return out


def as_activation(x: object) -> Activation:
    if not isinstance(x, Activation):
        raise NotCapturable(f"an operation is given a {type(x).__name__} for an activation")
    return x


def width_of(x: Activation) -> int:
    if len(x.tail) != 1:
        raise NotCapturable(f"an operation on rows is given {x.tail}")
    return x.tail[0]


def as_tensor(activation: Activation) -> torch.Tensor:
    """The activation, which is a tensor to the forward pass."""
    return cast("torch.Tensor", activation)
