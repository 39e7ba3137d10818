"""The list of what a forward pass does to placeholders, as commands of the library.

Owns the checks of what is taken down. Must not know models.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from kernels.cpu.attention import NativeAttentionPlan, check_caches, of_each_head
from kernels.cpu.commands import AttentionCall, Command, CommandKind
from kernels.cpu.elementwise import Rotary, head_weight
from kernels.cpu.linear import PackedParts
from kernels.cpu.placeholders import Memory, NotRecordable, Placeholder, Positions, TokenIds
from kernels.cpu.weights import PackedLinear
from kernels.interface.operations import ForwardContext, LinearWeight

_FLOAT_BYTES = 4


class Recorder:
    """Takes the operations of one forward pass down as commands.

    Args:
        capacity: tokens that the memory of every placeholder holds.
        context: of a real step; tells caches and plans.
    """

    def __init__(self, capacity: int, context: ForwardContext) -> None:
        self._capacity = capacity
        self._free: dict[int, list[torch.Tensor]] = {}
        self._commands: list[Command] = []
        self.keeps: list[object] = []
        self.token_ids = TokenIds(self)
        self.positions = Positions()
        self._plans = {id(metadata.slot_mapping_T): metadata.plan for metadata in context.metadata}

    @property
    def commands(self) -> ctypes.Array[Command]:
        """What was taken down, as the library reads it."""
        return (Command * len(self._commands))(*self._commands)

    def add(
        self,
        kind: CommandKind,
        *,
        out: Placeholder,
        size: int,
        subject: Placeholder | None = None,
        operand: int = 0,
        plan: NativeAttentionPlan | None = None,
        column: int = 0,
        stride: int = 0,
        number: float = 0.0,
    ) -> Placeholder:
        """One command, which writes `out` from `column` on; returns `out`.

        `stride` only where there is no subject to have one.
        """
        self._commands.append(
            Command(
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

    def embedding(self, weight: torch.Tensor | LinearWeight) -> torch.Tensor:
        """See `Operations.embedding`; so are the methods below named after theirs."""
        if isinstance(weight, PackedLinear):
            self.keeps.append(weight)
            size = weight.num_inputs
            out, operand = self.new(size), weight.address
            return _as_tensor(
                self.add(CommandKind.EMBEDDING_PACKED, out=out, operand=operand, size=size)
            )
        if not isinstance(weight, torch.Tensor):
            raise NotRecordable
        num_rows, size = weight.shape
        operand = self._weight(weight, (num_rows, size))
        out = self.new(size)
        self.add(CommandKind.EMBEDDING, out=out, operand=operand, stride=num_rows, size=size)
        return _as_tensor(out)

    def rms_norm(self, x_TE: object, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        x = _placeholder(x_TE)
        (size,) = x.tail
        operand = self._weight(weight_E, (size,))
        out = self.new(size)
        return _as_tensor(
            self.add(
                CommandKind.RMS_NORM, subject=x, operand=operand, out=out, size=size, number=eps
            )
        )

    def add_rms_norm(
        self, x_TE: object, residual_TE: object, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _placeholder(x_TE), _placeholder(residual_TE)
        size = x.stride
        if x.tail != (size,) or residual.tail != (size,) or x.memory is residual.memory:
            raise NotRecordable
        operand = self._weight(weight_E, (size,))
        self.add(
            CommandKind.ADD_RMS_NORM,
            subject=x,
            operand=operand,
            out=residual,
            size=size,
            number=eps,
        )
        return _as_tensor(x), _as_tensor(residual)

    def linear(self, x_TE: object, weight: LinearWeight) -> torch.Tensor:
        x = _placeholder(x_TE)
        parts = weight.parts if isinstance(weight, PackedParts) else (weight,)
        if x.tail != (weight.num_inputs,):
            raise NotRecordable
        self.keeps.append(weight)
        out, column = self.new(weight.num_outputs), 0
        for part in parts:
            if not isinstance(part, PackedLinear):
                raise NotRecordable
            size = part.num_outputs
            self.add(
                CommandKind.LINEAR,
                subject=x,
                operand=part.address,
                out=out,
                column=column,
                size=size,
            )
            column += size
        return _as_tensor(out)

    def gated_activation(self, gate_up_TF2: object, kind: CommandKind) -> torch.Tensor:
        gate_up = _placeholder(gate_up_TF2)
        (both,) = gate_up.tail
        if both % 2 or gate_up.stride != both:
            raise NotRecordable
        out = self.new(both // 2)
        return _as_tensor(self.add(kind, subject=gate_up, out=out, size=both // 2))

    def rotary_and_cache(
        self,
        qkv_TN: object,
        *,
        num_query_heads: int,
        head_size: int,
        cos_sin_PD: torch.Tensor,
        positions_T: object,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        q_norm_weight_D: torch.Tensor | None,
        k_norm_weight_D: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor:
        qkv = _placeholder(qkv_TN)
        plan = self._plans.get(id(slot_mapping_T))
        num_blocks, block_size, num_kv_heads, _ = k_cache_BSKD.shape
        width = (num_query_heads + 2 * num_kv_heads) * head_size
        if (
            not isinstance(plan, NativeAttentionPlan)
            or positions_T is not self.positions
            or qkv.tail != (width,)
        ):
            raise NotRecordable
        check_caches(plan, k_cache_BSKD, v_cache_BSKD)
        rotary = Rotary(
            qkv=qkv.address,
            cos_sin=self._weight(cos_sin_PD, tuple(cos_sin_PD.shape)),
            k_cache=k_cache_BSKD.data_ptr(),
            v_cache=v_cache_BSKD.data_ptr(),
            q_weight=head_weight("q_norm_weight", q_norm_weight_D, head_size),
            k_weight=head_weight("k_norm_weight", k_norm_weight_D, head_size),
            qkv_stride=qkv.stride,
            num_positions=cos_sin_PD.shape[0],
            num_slots=num_blocks * block_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            half=cos_sin_PD.shape[1] // 2,
            stored_kind=plan.geometry.stored_kind,
            eps=norm_eps,
        )
        self.keeps += [rotary, q_norm_weight_D, k_norm_weight_D]
        self.add(
            CommandKind.ROTARY, out=qkv, operand=ctypes.addressof(rotary), plan=plan, size=width
        )
        q = Placeholder(self, qkv.memory, (num_query_heads, head_size), qkv.stride)
        return _as_tensor(q)

    def paged_attention(
        self,
        q_THD: object,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        plan: object,
        *,
        scale: float,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
        alibi_slopes_H: torch.Tensor | None,
    ) -> torch.Tensor:
        q = _placeholder(q_THD)
        if not isinstance(plan, NativeAttentionPlan):
            raise NotRecordable
        heads = int(plan.geometry.num_query_heads), int(plan.geometry.head_size)
        if q.tail != heads:
            raise NotRecordable
        check_caches(plan, k_cache_BSKD, v_cache_BSKD)
        call = AttentionCall(
            k=k_cache_BSKD.data_ptr(),
            v=v_cache_BSKD.data_ptr(),
            sinks=of_each_head("sinks", sinks_H, heads[0]),
            slopes=of_each_head("slopes", alibi_slopes_H, heads[0]),
            num_blocks=k_cache_BSKD.shape[0],
            scale=scale,
            softcap=softcap or 0.0,
        )
        self.keeps += [call, sinks_H, alibi_slopes_H]
        size = heads[0] * heads[1]
        out = Placeholder(self, Memory(self._free, self._capacity, size), heads, size)
        self.add(
            CommandKind.ATTENTION,
            subject=q,
            operand=ctypes.addressof(call),
            out=out,
            plan=plan,
            size=size,
        )
        return _as_tensor(out)

    def new(self, size: int) -> Placeholder:
        """An activation [T, size]."""
        return Placeholder(self, Memory(self._free, self._capacity, size), (size,), size)

    def _weight(self, weight: torch.Tensor, shape: tuple[int, ...]) -> int:
        if weight.dtype is not torch.float32 or weight.shape != shape or not weight.is_contiguous():
            raise NotRecordable
        self.keeps.append(weight)
        return weight.data_ptr()


def recorder_of(x: object) -> Recorder | None:
    """Who takes down what is done to `x`; None for a tensor."""
    return x.recorder if isinstance(x, Placeholder | TokenIds) else None


def _placeholder(x: object) -> Placeholder:
    if not isinstance(x, Placeholder):
        raise NotRecordable
    return x


def _as_tensor(placeholder: Placeholder) -> torch.Tensor:
    """To the forward pass it is one."""
    return cast("torch.Tensor", placeholder)
