"""Captures the operations of one forward pass for the native library (`src/graph.h`).

The model runs once with placeholders for activations. What they cannot do raises `NotCapturable`.
"""

from __future__ import annotations

import ctypes
import math
from typing import cast

import torch

from kernels.cpu.attention import (
    NativeAttentionPlan,
    Rotary,
    attention_operands,
    fill_rotary,
    key_choice,
)
from kernels.cpu.experts import NativeExpertWeights
from kernels.cpu.graph_ops import GraphOpKind, HostCall
from kernels.cpu.linear import PackedParts
from kernels.cpu.lora import NativeLoRAStack
from kernels.cpu.op_recorder import (
    Activation,
    NotCapturable,
    OpRecorder,
    Placeholder,
    as_activation,
    as_tensor,
    width_of,
)
from kernels.cpu.recurrent_layers import check_gated, layer_of, norm_of, takes
from kernels.cpu.weights import PANEL_OUTPUTS, PackedLinear
from kernels.interface.kv_cache import KVCache
from kernels.interface.lora import LoRAStack
from kernels.interface.operations import AllReduce, AttentionParams, ForwardContext, RotaryParams
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)
from kernels.interface.special_inputs import PositionScores
from kernels.interface.weights import ExpertRouting, ExpertWeights, LinearWeight


class GraphCapture(OpRecorder):
    """Captures the operations of one forward pass. Methods are named after those of `Operations`.

    Args:
        capacity: tokens that the memory of every activation holds.
        context: of a real step; has the caches and plans.
    """

    def __init__(self, capacity: int, context: ForwardContext) -> None:
        super().__init__(capacity)
        self.keeps: list[object] = []
        self.host_calls: list[HostCall] = []
        self.token_ids = Placeholder(self)
        self.positions = Placeholder(self)
        self._plans = {id(metadata.slot_mapping_T): metadata.plan for metadata in context.metadata}

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
        return as_tensor(self.add(kind, out=out, operand=operand, stride=stride, size=size))

    def replace_rows(self, x_TE: object) -> torch.Tensor:
        x = as_activation(x_TE)
        if not x.is_dense_row:
            raise NotCapturable(f"it replaces rows of {x.tail}")
        return as_tensor(self.add(GraphOpKind.GIVEN_ROWS, out=x, size=x.stride))

    def take_rows(self, x_TE: object) -> torch.Tensor:
        x = as_activation(x_TE)
        self.takes_rows = True
        return as_tensor(self.add(GraphOpKind.TAKE_ROWS, out=x, size=math.prod(x.tail)))

    def reduce(self, x_TE: object, all_reduce: AllReduce) -> torch.Tensor:
        x = as_activation(x_TE)
        if not x.is_dense_row:
            raise NotCapturable(f"it sums rows of {x.tail} over ranks")
        call = HostCall(x.rows, all_reduce)
        self.host_calls.append(call)
        operand = ctypes.cast(call.function, ctypes.c_void_p).value or 0
        return as_tensor(self.add(GraphOpKind.HOST, out=x, operand=operand, size=x.stride))

    def norm(
        self, kind: GraphOpKind, x_TE: object, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMS norm or layer norm, by kind."""
        x = as_activation(x_TE)
        size = width_of(x)
        operand = self._weight(weight, (*weight.shape[:-1], size))
        out = self.new(size)
        self.add(kind, subject=x, operand=operand, out=out, size=size, number=eps)
        return as_tensor(out)

    def add_norm(
        self,
        kind: GraphOpKind,
        x_TE: object,
        residual_TE: object,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of two, and its norm."""
        x, residual = as_activation(x_TE), as_activation(residual_TE)
        size = x.stride
        if not x.is_dense_row or residual.tail != x.tail or x.memory is residual.memory:
            raise NotCapturable(f"it adds {x.tail} to {residual.tail}")
        operand = self._weight(weight, (*weight.shape[:-1], size))
        self.add(kind, subject=x, operand=operand, out=residual, size=size, number=eps)
        return as_tensor(x), as_tensor(residual)

    def linear(self, x_TE: object, weight: LinearWeight) -> torch.Tensor:
        x, kind = as_activation(x_TE), GraphOpKind.LINEAR
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
        return as_tensor(out)

    def mixture_of_experts(
        self, x_TE: object, logits_TX: object, experts: ExpertWeights, routing: ExpertRouting
    ) -> torch.Tensor:
        x, logits = as_activation(x_TE), as_activation(logits_TX)
        if not isinstance(experts, NativeExpertWeights):
            raise NotCapturable(f"experts in {type(experts).__name__} are not native")
        if x.tail != (experts.num_inputs,) or not x.is_dense_row or not logits.is_dense_row:
            raise NotCapturable(f"experts take {experts.num_inputs} inputs, they get {x.tail}")
        layer = experts.layer(logits.stride, routing)
        layer.logits = logits.address
        self.keeps += [layer, experts]
        out, size = self.new(experts.num_inputs), experts.num_inputs
        operand, kind = ctypes.addressof(layer), GraphOpKind.EXPERTS
        return as_tensor(self.add(kind, subject=x, operand=operand, out=out, size=size))

    def add_lora(self, out_TN: object, x_TE: object, stack: LoRAStack) -> torch.Tensor:
        out, x = as_activation(out_TN), as_activation(x_TE)
        if not isinstance(stack, NativeLoRAStack):
            raise NotCapturable(f"adapters in {type(stack).__name__} are not native")
        if x.tail != (stack.num_inputs,) or out.tail != (stack.num_outputs,):
            raise NotCapturable(f"adapters are given {x.tail} for {out.tail}")
        self.keeps.append(stack)
        size = stack.num_outputs
        self.add(GraphOpKind.LORA, subject=x, operand=stack.address, out=out, size=size)
        return as_tensor(out)

    def gated_activation(self, gate_up_TF2: object, kind: GraphOpKind) -> torch.Tensor:
        gate_up = as_activation(gate_up_TF2)
        both = width_of(gate_up)
        if both % 2 or gate_up.stride != both:
            raise NotCapturable(f"the halves of a gated activation lie in {gate_up.tail}")
        out, size = self.new(both // 2), both // 2
        last = self.ops[-1]
        is_product = last.kind == GraphOpKind.LINEAR and last.subject != out.address
        is_whole = (last.out, last.size) == (gate_up.address, both) and size % PANEL_OUTPUTS == 0
        is_one = is_product and is_whole
        self.add(kind, subject=gate_up, out=out, size=size, number=float(is_one))
        gate_up.memory.is_skipped = is_one
        return as_tensor(out)

    def activate(self, x_TF: object, activation: int) -> torch.Tensor:
        x, kind = as_activation(x_TF), GraphOpKind.ACTIVATE
        if not x.is_dense_row:
            raise NotCapturable(f"it activates {x.tail} with gaps between rows")
        return as_tensor(self.add(kind, out=x, size=x.stride, stride=activation))

    def rotary_and_cache(
        self,
        qkv_TN: object,
        positions_T: object,
        slot_mapping_T: torch.Tensor,
        kv_cache: KVCache | None,
        params: RotaryParams,
    ) -> torch.Tensor:
        qkv = as_activation(qkv_TN)
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
        return as_tensor(Activation(self, qkv.memory, heads, qkv.stride, qkv.column))

    def paged_attention(
        self,
        q_THD: object,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        plan: NativeAttentionPlan,
        params: AttentionParams,
        positions: PositionScores | None = None,
        chosen_TK: object | None = None,
    ) -> torch.Tensor:
        q = as_activation(q_THD)
        heads = int(plan.geometry.num_query_heads), int(plan.geometry.head_size)
        if q.tail != heads:
            raise NotCapturable(f"attention is planned for {heads}, it is given {q.tail}")
        caches, find = (k_cache_BSKD, v_cache_BSKD), _address_of_rows
        operands = attention_operands(plan, *caches, params, positions, find)
        if chosen_TK is not None:
            chosen = as_activation(chosen_TK)
            operands.chosen, operands.top_k = chosen.address, width_of(chosen)
        self.keeps += [operands, params]
        out_heads = heads[0], int(plan.geometry.value_size)
        size = math.prod(out_heads)
        out = Activation(self, self.new(size).memory, out_heads, size)
        operand, kind = ctypes.addressof(operands), GraphOpKind.ATTENTION
        self.add(kind, subject=q, operand=operand, out=out, plan=plan, size=size)
        return as_tensor(out)

    def choose_keys(
        self,
        q_THD: object,
        weights_TH: object,
        index: KVCache,
        plan: NativeAttentionPlan,
        top_k: int,
    ) -> torch.Tensor:
        q, weights, size = as_activation(q_THD), as_activation(weights_TH), index.shape.key_size
        if q.tail != (width_of(weights), size):
            raise NotCapturable(f"{q.tail} choose among keys of {size} by {weights.tail}")
        call = key_choice(index, width_of(weights), plan, top_k)
        call.weights, call.weights_stride = weights.address, weights.stride
        self.keeps += [call, index]
        operand, out = ctypes.addressof(call), self.new(top_k)
        kind = GraphOpKind.CHOOSE_KEYS
        self.add(kind, subject=q, operand=operand, out=out, plan=plan, size=top_k)
        return as_tensor(out)

    def convolve(
        self, x_TC: object, params: ConvolutionParams, cache: RecurrentCache, plan: object
    ) -> torch.Tensor:
        x = as_activation(x_TC)
        size = params.shape.num_channels
        if x.tail != (size,) or not takes(cache, params.shape.width):
            raise NotCapturable(f"a convolution of {size} channels is given {x.tail}")
        layer = layer_of(cache, params)
        self.keeps += [layer, params, cache]
        operand, out = ctypes.addressof(layer), self.new(size)
        kind, plan = GraphOpKind.CONVOLVE, native_plan(plan)
        self.add(kind, subject=x, operand=operand, out=out, plan=plan, size=size)
        return as_tensor(out)

    def recur(
        self,
        qkv_TC: object,
        a_TN: object,
        b_TH: object,
        params: RecurrenceParams,
        cache: RecurrentCache,
        plan: object,
    ) -> torch.Tensor:
        qkv, shape = as_activation(qkv_TC), params.shape
        if not takes(cache):
            raise NotCapturable("a recurrence over another dtype than float32")
        layer = layer_of(cache, params=params)
        if params.bias_HD is not None:
            a = as_activation(a_TN)
            layer.a, layer.a_stride = a.address, a.stride
        if params.rule == "delta":
            b = as_activation(b_TH)
            layer.b, layer.b_stride = b.address, b.stride
        self.keeps += [layer, params, cache]
        size = shape.num_heads * shape.value_size
        operand, out = ctypes.addressof(layer), self.new(size)
        kind, plan = GraphOpKind.RECUR, native_plan(plan)
        self.add(kind, subject=qkv, operand=operand, out=out, plan=plan, size=size)
        return as_tensor(out)

    def gated_norm(self, x_TN: object, gate_TN: object, params: GatedNormParams) -> torch.Tensor:
        x, by = as_activation(x_TN), as_activation(gate_TN)
        size = width_of(x)
        check_gated(size, width_of(by), params)
        call = norm_of(params)
        call.gate, call.gate_stride = by.address, by.stride
        self.keeps += [call, params]
        operand, out = ctypes.addressof(call), self.new(size)
        kind = GraphOpKind.GATED_NORM
        return as_tensor(self.add(kind, subject=x, operand=operand, out=out, size=size))

    def gate(self, x_TN: object, gate_TN: object, activation: str | None) -> torch.Tensor:
        x = as_activation(x_TN)
        size, out = width_of(x), self.new(width_of(x))
        if isinstance(gate_TN, torch.Tensor):
            address, stride = self._weight(gate_TN, (1, size)), 0.0
        else:
            by = as_activation(gate_TN)
            if by.tail != x.tail:
                raise NotCapturable(f"{x.tail} is multiplied by a gate of {by.tail}")
            address, stride = by.address, float(by.stride)
        kind = GraphOpKind.MULTIPLY if activation is None else GraphOpKind.GATE
        self.add(kind, subject=x, operand=address, out=out, size=size, number=stride)
        return as_tensor(out)

    def _weight(self, weight: torch.Tensor, shape: tuple[int, ...]) -> int:
        if weight.dtype is not torch.float32 or weight.shape != shape or not weight.is_contiguous():
            raise NotCapturable(
                f"a weight is {weight.dtype} {tuple(weight.shape)}, not contiguous float32 of "
                f"{shape}"
            )
        self.keeps.append(weight)
        return weight.data_ptr()


def _address_of_rows(x: object) -> int:
    rows = as_activation(x)
    if not rows.is_dense_row:
        raise NotCapturable(f"scores of positions lie in {rows.tail}")
    return rows.address


def capture_of(x: object) -> GraphCapture | None:
    """The capture of the operations on `x`; None for a tensor."""
    return cast("GraphCapture", x.capture) if isinstance(x, Placeholder) else None


def native_plan(plan: object) -> NativeAttentionPlan:
    """The plan, or NotCapturable for another backend's or none."""
    if not isinstance(plan, NativeAttentionPlan):
        raise NotCapturable(f"attention is planned in {type(plan).__name__}, not natively")
    return plan
