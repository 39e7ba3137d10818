"""Captures the operations of one forward pass for the native library (`src/graph.h`).

The model runs once with placeholders for activations. What they cannot do raises `NotCapturable`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NoReturn, cast

import torch

from kernels.cpu.attention import (
    NativeAttentionPlan,
    Rotary,
    attention_operands,
    fill_rotary,
)
from kernels.cpu.experts import NativeExpertWeights
from kernels.cpu.graph_ops import GraphOp, GraphOpKind, HostCall
from kernels.cpu.linear import PackedParts
from kernels.cpu.lora import NativeLoRAStack
from kernels.cpu.weights import PANEL_OUTPUTS, PackedLinear
from kernels.interface.kv_cache import KVCache
from kernels.interface.lora import LoRAStack
from kernels.interface.operations import (
    AllReduce,
    AttentionParams,
    ExpertRouting,
    ForwardContext,
    RotaryParams,
)
from kernels.interface.weights import ExpertWeights, LinearWeight

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

    def __init__(self, capture: GraphCapture) -> None:
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
    """Stands for an activation [T, *tail]. `stride`: floats from a token's row to the next."""

    def __init__(
        self, capture: GraphCapture, memory: _Memory, tail: tuple[int, ...], stride: int
    ) -> None:
        super().__init__(capture)
        self.memory = memory
        self.tail = tail
        self.stride = stride

    @property
    def address(self) -> int:
        """The address of the first token's row."""
        return self.rows.data_ptr()

    @property
    def rows(self) -> torch.Tensor:
        """[capacity, size]. Raises NotCapturable: the pass may skip writing them."""
        if self.memory.is_skipped:
            raise NotCapturable("it uses a product again behind its gated activation")
        return self.memory.tensor

    def flatten(self, start: int) -> Activation:
        """[T, H, D] -> [T, H * D]."""
        size = math.prod(self.tail)
        if start != 1 or self.stride != size:
            raise NotCapturable(f"it flattens {self.tail} from dimension {start} on")
        return Activation(self.capture, self.memory, (size,), size)

    def view(self, rows: int, *sizes: int) -> Activation:
        """[T, H * D] -> [T, H, D]."""
        if rows != -1 or self.tail != (math.prod(sizes),):
            raise NotCapturable(f"it views {self.tail} as {sizes}")
        return Activation(self.capture, self.memory, sizes, self.stride)

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
    rows = [_activation(part) for part in parts]
    out, column = rows[0].capture.new(sum(map(_width, rows))), 0
    for part in rows:
        size = _width(part)
        out.capture.add(GraphOpKind.COPY, subject=part, out=out, column=column, size=size)
        column += size
    return out


class GraphCapture:
    """Captures the operations of one forward pass. Methods are named after those of `Operations`.

    Args:
        capacity: tokens that the memory of every activation holds.
        context: of a real step; has the caches and plans.
    """

    def __init__(self, capacity: int, context: ForwardContext) -> None:
        self._capacity = capacity
        self._free: dict[int, list[torch.Tensor]] = {}
        self._ops: list[GraphOp] = []
        self.keeps: list[object] = []
        self.host_calls: list[HostCall] = []
        self.token_ids = Placeholder(self)
        self.positions = Placeholder(self)
        self.takes_rows = False
        self._plans = {id(metadata.slot_mapping_T): metadata.plan for metadata in context.metadata}

    @property
    def ops(self) -> ctypes.Array[GraphOp]:
        """The captured operations, as the library reads them."""
        return (GraphOp * len(self._ops))(*self._ops)

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
        self._ops.append(
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

    def embedding(self, ids: object, weight: torch.Tensor | LinearWeight) -> torch.Tensor:
        is_of_tokens = ids is self.token_ids
        if isinstance(weight, PackedLinear) and is_of_tokens:
            self.keeps.append(weight)
            size, operand, stride = weight.num_inputs, weight.address, 0
            kind = GraphOpKind.EMBEDDING_PACKED
        elif isinstance(weight, torch.Tensor):
            stride, size = weight.shape
            operand = self._weight(weight, (stride, size))
            kind = GraphOpKind.EMBEDDING if is_of_tokens else GraphOpKind.EMBEDDING_AT
        else:
            raise NotCapturable(f"an embedding in {type(weight).__name__} is not native")
        if not is_of_tokens and ids is not self.positions:
            raise NotCapturable("it embeds neither the step's tokens nor their positions")
        out = self.new(size)
        return _as_tensor(self.add(kind, out=out, operand=operand, stride=stride, size=size))

    def replace_rows(self, x_TE: object) -> torch.Tensor:
        x = _activation(x_TE)
        if not x.is_dense_row:
            raise NotCapturable(f"it replaces rows of {x.tail}")
        return _as_tensor(self.add(GraphOpKind.GIVEN_ROWS, out=x, size=x.stride))

    def take_rows(self, x_TE: object) -> torch.Tensor:
        x = _activation(x_TE)
        self.takes_rows = True
        return _as_tensor(self.add(GraphOpKind.TAKE_ROWS, out=x, size=math.prod(x.tail)))

    def reduce(self, x_TE: object, all_reduce: AllReduce) -> torch.Tensor:
        x = _activation(x_TE)
        if not x.is_dense_row:
            raise NotCapturable(f"it sums rows of {x.tail} over ranks")
        call = HostCall(x.rows, all_reduce)
        self.host_calls.append(call)
        operand = ctypes.cast(call.function, ctypes.c_void_p).value or 0
        return _as_tensor(self.add(GraphOpKind.HOST, out=x, operand=operand, size=x.stride))

    def norm(
        self, kind: GraphOpKind, x_TE: object, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMS norm or layer norm, by kind."""
        x = _activation(x_TE)
        size = _width(x)
        operand = self._weight(weight, (*weight.shape[:-1], size))
        out = self.new(size)
        self.add(kind, subject=x, operand=operand, out=out, size=size, number=eps)
        return _as_tensor(out)

    def add_norm(
        self,
        kind: GraphOpKind,
        x_TE: object,
        residual_TE: object,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of two, and its norm."""
        x, residual = _activation(x_TE), _activation(residual_TE)
        size = x.stride
        if not x.is_dense_row or residual.tail != x.tail or x.memory is residual.memory:
            raise NotCapturable(f"it adds {x.tail} to {residual.tail}")
        operand = self._weight(weight, (*weight.shape[:-1], size))
        self.add(kind, subject=x, operand=operand, out=residual, size=size, number=eps)
        return _as_tensor(x), _as_tensor(residual)

    def linear(self, x_TE: object, weight: LinearWeight) -> torch.Tensor:
        x, kind = _activation(x_TE), GraphOpKind.LINEAR
        parts = weight.parts if isinstance(weight, PackedParts) else (weight,)
        if x.tail != (weight.num_inputs,):
            raise NotCapturable(f"a product takes {weight.num_inputs} inputs, it is given {x.tail}")
        self.keeps.append(weight)
        out, column = self.new(weight.num_outputs), 0
        for part in parts:
            if not isinstance(part, PackedLinear):
                raise NotCapturable(f"a product with {type(part).__name__} is not native")
            size, operand = part.num_outputs, part.address
            self.add(kind, subject=x, operand=operand, out=out, column=column, size=size)
            column += size
        return _as_tensor(out)

    def mixture_of_experts(
        self, x_TE: object, logits_TX: object, experts: ExpertWeights, routing: ExpertRouting
    ) -> torch.Tensor:
        x, logits = _activation(x_TE), _activation(logits_TX)
        if not isinstance(experts, NativeExpertWeights):
            raise NotCapturable(f"experts in {type(experts).__name__} are not native")
        if x.tail != (experts.num_inputs,) or not x.is_dense_row or not logits.is_dense_row:
            raise NotCapturable(f"experts take {experts.num_inputs} inputs, they get {x.tail}")
        layer = experts.layer(logits.stride, routing)
        layer.logits = logits.address
        self.keeps += [layer, experts]
        out, size = self.new(experts.num_inputs), experts.num_inputs
        operand, kind = ctypes.addressof(layer), GraphOpKind.EXPERTS
        return _as_tensor(self.add(kind, subject=x, operand=operand, out=out, size=size))

    def add_lora(self, out_TN: object, x_TE: object, stack: LoRAStack) -> torch.Tensor:
        out, x = _activation(out_TN), _activation(x_TE)
        if not isinstance(stack, NativeLoRAStack):
            raise NotCapturable(f"adapters in {type(stack).__name__} are not native")
        if x.tail != (stack.num_inputs,) or out.tail != (stack.num_outputs,):
            raise NotCapturable(f"adapters are given {x.tail} for {out.tail}")
        self.keeps.append(stack)
        size = stack.num_outputs
        self.add(GraphOpKind.LORA, subject=x, operand=stack.address, out=out, size=size)
        return _as_tensor(out)

    def gated_activation(self, gate_up_TF2: object, kind: GraphOpKind) -> torch.Tensor:
        gate_up = _activation(gate_up_TF2)
        both = _width(gate_up)
        if both % 2 or gate_up.stride != both:
            raise NotCapturable(f"the halves of a gated activation lie in {gate_up.tail}")
        out, size = self.new(both // 2), both // 2
        last = self._ops[-1]
        is_product = last.kind == GraphOpKind.LINEAR and last.subject != out.address
        is_whole = (last.out, last.size) == (gate_up.address, both) and size % PANEL_OUTPUTS == 0
        is_one = is_product and is_whole
        self.add(kind, subject=gate_up, out=out, size=size, number=float(is_one))
        gate_up.memory.is_skipped = is_one
        return _as_tensor(out)

    def activate(self, x_TF: object, activation: int) -> torch.Tensor:
        x, kind = _activation(x_TF), GraphOpKind.ACTIVATE
        if not x.is_dense_row:
            raise NotCapturable(f"it activates {x.tail} with gaps between rows")
        return _as_tensor(self.add(kind, out=x, size=x.stride, stride=activation))

    def rotary_and_cache(
        self,
        qkv_TN: object,
        positions_T: object,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache | None,
        params: RotaryParams,
    ) -> torch.Tensor:
        qkv = _activation(qkv_TN)
        plan = native_plan(self._plans.get(id(slot_mapping_T)))
        heads = params.num_query_heads, params.head_size
        rotary = Rotary(qkv=qkv.address, qkv_stride=qkv.stride)
        width = fill_rotary(rotary, kv_cache, params)
        if positions_T is not self.positions or qkv.tail != (width,):
            raise NotCapturable(f"it rotates {qkv.tail}, or by other positions than the step's")
        self._weight(params.cos_sin_PD, tuple(params.cos_sin_PD.shape))
        self.keeps += [rotary, params]
        operand, kind = ctypes.addressof(rotary), GraphOpKind.ROTARY
        self.add(kind, out=qkv, operand=operand, plan=plan, size=width)
        return _as_tensor(Activation(self, qkv.memory, heads, qkv.stride))

    def paged_attention(
        self,
        q_THD: object,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        plan: NativeAttentionPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        q = _activation(q_THD)
        heads = int(plan.geometry.num_query_heads), int(plan.geometry.head_size)
        if q.tail != heads:
            raise NotCapturable(f"attention is planned for {heads}, it is given {q.tail}")
        operands = attention_operands(plan, k_cache_BSKD, v_cache_BSKD, params)
        self.keeps += [operands, params]
        size = heads[0] * heads[1]
        out = Activation(self, _Memory(self._free, self._capacity, size), heads, size)
        operand, kind = ctypes.addressof(operands), GraphOpKind.ATTENTION
        self.add(kind, subject=q, operand=operand, out=out, plan=plan, size=size)
        return _as_tensor(out)

    def new(self, size: int) -> Activation:
        """An activation [T, size]."""
        return Activation(self, _Memory(self._free, self._capacity, size), (size,), size)

    def _weight(self, weight: torch.Tensor, shape: tuple[int, ...]) -> int:
        if weight.dtype is not torch.float32 or weight.shape != shape or not weight.is_contiguous():
            raise NotCapturable(
                f"a weight is {weight.dtype} {tuple(weight.shape)}, not contiguous float32 of "
                f"{shape}"
            )
        self.keeps.append(weight)
        return weight.data_ptr()


def capture_of(x: object) -> GraphCapture | None:
    """The capture of the operations on `x`; None for a tensor."""
    return x.capture if isinstance(x, Placeholder) else None


def native_plan(plan: object) -> NativeAttentionPlan:
    """The plan, or NotCapturable for another backend's or none."""
    if not isinstance(plan, NativeAttentionPlan):
        raise NotCapturable(f"attention is planned in {type(plan).__name__}, not natively")
    return plan


def _activation(x: object) -> Activation:
    if not isinstance(x, Activation):
        raise NotCapturable(f"an operation is given a {type(x).__name__} for an activation")
    return x


def _width(x: Activation) -> int:
    if len(x.tail) != 1:
        raise NotCapturable(f"an operation on rows is given {x.tail}")
    return x.tail[0]


def _as_tensor(activation: Activation) -> torch.Tensor:
    """The activation, which is a tensor to the forward pass."""
    return cast("torch.Tensor", activation)
