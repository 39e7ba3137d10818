"""A forward pass as one call into the library: recorded once with placeholders, then run each step.

Owns when a recording holds, and the step that is run. Must not know models, nor how a recording is
made (`kernels.cpu.recorder`). A forward pass that cannot be recorded is run as it is.

At 135 million parameters the way from Python into 270 operations a step costs as much as the
operations of an int8 step; a recorded step is one call.

    forward(placeholders) -> commands: rms_norm, linear, rotary, attention, ...   once
    run(token ids, positions, plans of attention)                                 each step
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from kernels.cpu.commands import Step
from kernels.cpu.library import NativeLibrary, check
from kernels.cpu.placeholders import NotRecordable, Placeholder
from kernels.cpu.recorder import Recorder
from kernels.interface.operations import Forward, ForwardContext

_LEAST_CAPACITY = 64


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
        self.step = Step(
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
        self._run = library.function("ec_run_program", ctypes.c_void_p)
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
