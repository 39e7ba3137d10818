"""A forward pass as one call into the library: recorded once with placeholders, then run each step.

Owns the list of commands and the memory between them. Must not know models: what a forward pass
does is found by running it on placeholders, which know `CpuOperations` and nothing else. A forward
pass that does more to them cannot be recorded, and is run as it is.

At 135 million parameters the way from Python into 270 operations a step costs as much as the
operations of an int8 step; a recorded step is one call.

    forward(placeholders) -> commands: rms_norm, linear, rotary, attention, ...   once
    run(token ids, positions, plans of attention)                                 each step
"""

from __future__ import annotations

import ctypes
import math
from typing import cast

import torch

from kernels.cpu.attention import NativeAttentionPlan, check_caches, of_each_head
from kernels.cpu.elementwise import Rotary, head_weight
from kernels.cpu.library import NativeLibrary, check
from kernels.cpu.linear import PackedParts
from kernels.cpu.weights import PackedLinear
from kernels.interface import Forward, ForwardContext, LinearWeight

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_LEAST_CAPACITY = 64
_FLOAT_BYTES = 4

(
    _EMBEDDING,
    _RMS_NORM,
    _ADD_RMS_NORM,
    _LINEAR,
    _ROTARY,
    _ATTENTION,
    SILU,
    GELU_TANH,
    _SCALE,
    _EMBEDDING_PACKED,
) = range(10)


class _Command(ctypes.Structure):
    """Mirrors `Command` of src/program.h."""

    _fields_ = (
        ("kind", _INT64),
        ("subject", _POINTER),
        ("operand", _POINTER),
        ("out", _POINTER),
        ("geometry", _POINTER),
        ("stride", _INT64),
        ("out_stride", _INT64),
        ("size", _INT64),
        ("number", _FLOAT),
    )


class _AttentionCall(ctypes.Structure):
    """Mirrors `AttentionCall` there."""

    _fields_ = (
        ("k", _POINTER),
        ("v", _POINTER),
        ("sinks", _POINTER),
        ("slopes", _POINTER),
        ("num_blocks", _INT64),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


class _Step(ctypes.Structure):
    """Mirrors `Step` there."""

    _fields_ = (
        ("commands", _POINTER),
        ("num_commands", _INT64),
        ("capacity", _INT64),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("num_tokens", _INT64),
    )


class NotRecordable(Exception):
    """The forward pass does something that no command does."""


class _Memory:
    """[capacity, size] floats; used again by a later placeholder when no one holds it any more."""

    def __init__(self, free: dict[int, list[torch.Tensor]], capacity: int, size: int) -> None:
        self._unused = free.setdefault(size, [])
        if not self._unused:
            self._unused.append(torch.empty(capacity, size, dtype=torch.float32))
        self.tensor = self._unused.pop()

    def __del__(self) -> None:
        self._unused.append(self.tensor)


class Placeholder:
    """Stands for an activation [T, *tail] while a forward pass is recorded.

    Attributes:
        stride: floats from a token's row to the next.
    """

    def __init__(
        self, recorder: Recorder, memory: _Memory, tail: tuple[int, ...], stride: int
    ) -> None:
        self.recorder = recorder
        self.memory = memory
        self.tail = tail
        self.stride = stride

    @property
    def address(self) -> int:
        """Of the first token's row."""
        return self.memory.tensor.data_ptr()

    def flatten(self, start: int) -> Placeholder:
        """[T, H, D] -> [T, H * D]."""
        size = math.prod(self.tail)
        if start != 1 or self.stride != size:
            raise NotRecordable
        return Placeholder(self.recorder, self.memory, (size,), size)

    def mul_(self, factor: torch.Tensor) -> Placeholder:
        """By one number, in place."""
        if factor.numel() != 1 or self.tail != (self.stride,):
            raise NotRecordable
        return self.recorder.add(_SCALE, out=self, size=self.stride, number=float(factor))


class TokenIds:
    """Stands for a step's token ids."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder


class _Positions:
    """Stands for a step's positions."""


class Recorder:
    """Takes the operations of one forward pass down as commands.

    Args:
        capacity: tokens that the memory of every placeholder holds.
        context: of a real step; tells caches and plans.
    """

    def __init__(self, capacity: int, context: ForwardContext) -> None:
        self._capacity = capacity
        self._free: dict[int, list[torch.Tensor]] = {}
        self._commands: list[_Command] = []
        self.keeps: list[object] = []
        self.token_ids = TokenIds(self)
        self.positions = _Positions()
        self._plans = {id(metadata.slot_mapping_T): metadata.plan for metadata in context.metadata}

    @property
    def commands(self) -> ctypes.Array[_Command]:
        """What was taken down, as the library reads it."""
        return (_Command * len(self._commands))(*self._commands)

    def add(
        self,
        kind: int,
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
            _Command(
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
            return _as_tensor(self.add(_EMBEDDING_PACKED, out=out, operand=operand, size=size))
        if not isinstance(weight, torch.Tensor):
            raise NotRecordable
        num_rows, size = weight.shape
        operand = self._weight(weight, (num_rows, size))
        out = self.new(size)
        self.add(_EMBEDDING, out=out, operand=operand, stride=num_rows, size=size)
        return _as_tensor(out)

    def rms_norm(self, x_TE: object, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        x = _placeholder(x_TE)
        (size,) = x.tail
        operand = self._weight(weight_E, (size,))
        out = self.new(size)
        return _as_tensor(
            self.add(_RMS_NORM, subject=x, operand=operand, out=out, size=size, number=eps)
        )

    def add_rms_norm(
        self, x_TE: object, residual_TE: object, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _placeholder(x_TE), _placeholder(residual_TE)
        size = x.stride
        if x.tail != (size,) or residual.tail != (size,) or x.memory is residual.memory:
            raise NotRecordable
        operand = self._weight(weight_E, (size,))
        self.add(_ADD_RMS_NORM, subject=x, operand=operand, out=residual, size=size, number=eps)
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
            self.add(_LINEAR, subject=x, operand=part.address, out=out, column=column, size=size)
            column += size
        return _as_tensor(out)

    def gated_activation(self, gate_up_TF2: object, kind: int) -> torch.Tensor:
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
        self.add(_ROTARY, out=qkv, operand=ctypes.addressof(rotary), plan=plan, size=width)
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
        call = _AttentionCall(
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
        out = Placeholder(self, _Memory(self._free, self._capacity, size), heads, size)
        self.add(
            _ATTENTION, subject=q, operand=ctypes.addressof(call), out=out, plan=plan, size=size
        )
        return _as_tensor(out)

    def new(self, size: int) -> Placeholder:
        """An activation [T, size]."""
        return Placeholder(self, _Memory(self._free, self._capacity, size), (size,), size)

    def _weight(self, weight: torch.Tensor, shape: tuple[int, ...]) -> int:
        if weight.dtype is not torch.float32 or weight.shape != shape or not weight.is_contiguous():
            raise NotRecordable
        self.keeps.append(weight)
        return weight.data_ptr()


class _Program:
    """The commands of one forward pass, bound to its caches and planners."""

    def __init__(self, forward: Forward, capacity: int, context: ForwardContext) -> None:
        recorder = Recorder(capacity, context)
        # to the forward pass they are tensors
        result: object = forward(
            cast("torch.Tensor", recorder.token_ids),
            cast("torch.Tensor", recorder.positions),
            context,
        )
        if not isinstance(result, Placeholder) or result.tail != (result.stride,):
            raise NotRecordable
        self.capacity = capacity
        self.hidden = result.memory.tensor
        self.kv_caches = context.kv_caches
        self.plan_addresses = _plan_addresses(context)
        commands = recorder.commands
        self._keeps = (commands, recorder.keeps, recorder)
        self.step = _Step(
            commands=ctypes.addressof(commands), num_commands=len(commands), capacity=capacity
        )
        self.address = ctypes.addressof(self.step)


class RecordedForward:
    """A forward pass that is one call into the library, if all it does can be recorded.

    One thread uses it at a time.

    Attributes:
        is_recorded: whether the last call was; None before the first.
    """

    def __init__(self, library: NativeLibrary, forward: Forward) -> None:
        self._run = library.function("ec_run_program", _POINTER)
        self._forward = forward
        self._program: _Program | None = None
        self.is_recorded: bool | None = None

    def __call__(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `engine_core.models.interface.Model.forward`."""
        if self.is_recorded is False:
            return self._forward(token_ids_T, positions_T, context)
        num_tokens = token_ids_T.shape[0]
        program = self._program
        try:
            if (
                program is None
                or num_tokens > program.capacity
                or program.kv_caches is not context.kv_caches
                or program.plan_addresses != _plan_addresses(context)
            ):
                program = self._record(num_tokens, context)
        except (NotRecordable, AttributeError, TypeError):
            self.is_recorded = False
            return self._forward(token_ids_T, positions_T, context)
        if (
            positions_T.shape != (num_tokens,)
            or positions_T.dtype is not torch.int64
            or token_ids_T.dtype is not torch.int64
            or not (token_ids_T.is_contiguous() and positions_T.is_contiguous())
        ):
            raise ValueError(
                f"token ids {token_ids_T.dtype} {tuple(token_ids_T.shape)} and positions "
                f"{positions_T.dtype} {tuple(positions_T.shape)} must be contiguous int64 of [T]"
            )
        step = program.step
        step.token_ids = token_ids_T.data_ptr()
        step.positions = positions_T.data_ptr()
        step.num_tokens = num_tokens
        refusal = self._run(program.address)
        if refusal is not None:
            check(refusal)
        return program.hidden[:num_tokens].clone()

    def _record(self, num_tokens: int, context: ForwardContext) -> _Program:
        capacity = max(_LEAST_CAPACITY, 1 << (num_tokens - 1).bit_length())
        if self._program is not None:
            capacity = max(capacity, self._program.capacity)
            self._program = None  # its memory is free before more is taken
        self._program = _Program(self._forward, capacity, context)
        self.is_recorded = True
        return self._program


def _plan_addresses(context: ForwardContext) -> list[int]:
    """Where commands find the step's plans.

    Raises:
        AttributeError: a plan of torch's.
    """
    return [metadata.plan.address for metadata in context.metadata]  # type: ignore[attr-defined]


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
