"""A forward pass as one call into the library: captured once as a graph, then run each step.

At 135 million parameters, calling 270 operations a step from Python takes as long as the
operations of an int8 step."""

import ctypes
import dataclasses
import logging
from typing import Any, Generic, cast

import torch

from kernels.cpu.graph_capture import GraphCapture, native_plan
from kernels.cpu.graph_ops import GraphOp
from kernels.cpu.library import INT64, POINTER, NativeLibrary, check, members
from kernels.cpu.op_recorder import Activation, NotCapturable
from kernels.cpu.tensor_checks import check_tensor
from kernels.interface.operations import Forward, ForwardContext, PassResult

logger = logging.getLogger(__name__)

_LEAST_CAPACITY = 64


class GraphStep(ctypes.Structure):
    """Mirrors `GraphStep` of src/graph.h."""

    _fields_ = [
        ("ops", POINTER),
        *members(INT64, "num_ops", "capacity"),
        *members(POINTER, "token_ids", "positions"),
        ("num_tokens", INT64),
        *members(POINTER, "given_places", "given_rows"),
        *members(INT64, "num_given", "given_size"),
        *members(POINTER, "output_rows", "output_geometry"),
        ("num_output_rows", INT64),
    ]


class _Graph:
    """The operations of one forward pass, bound to its caches and planners."""

    def __init__(self, forward: Forward[Any], capacity: int, context: ForwardContext) -> None:
        self.plan_addresses = _plan_addresses(context)
        capture = GraphCapture(capacity, context)
        context = dataclasses.replace(context, output=None)  # the step has it
        # to the forward pass they are tensors
        result: object = forward(
            cast("torch.Tensor", capture.token_ids),
            cast("torch.Tensor", capture.positions),
            context,
        )
        self.is_tuple = isinstance(result, tuple)
        results = result if isinstance(result, tuple) else (result,)
        for each in results:
            if not isinstance(each, Activation) or not each.is_dense_row:
                raise NotCapturable(f"its result is {type(each).__name__}, not rows of activations")
        self.capacity = capacity
        self.results = [each.rows.numpy() for each in results]
        self.lent: dict[int, list[torch.Tensor]] = {}
        """Their first rows, by number."""
        self.kv_caches = context.kv_caches
        ops = (GraphOp * len(capture.ops))(*capture.ops)
        self._keeps = (ops, capture.keeps, capture)
        self.host_calls = capture.host_calls
        self.takes_rows = capture.takes_rows
        self.step = GraphStep(ops=ctypes.addressof(ops), num_ops=len(ops), capacity=capacity)
        self.address = ctypes.addressof(self.step)


class CapturedForward(Generic[PassResult]):
    """A captured forward pass, or one run operation by operation: the reason is logged once. One
    thread uses it at a time. `lends`: see `Operations.capture`. `is_captured`: whether the last
    call was; None before the first."""

    def __init__(
        self, library: NativeLibrary, forward: Forward[PassResult], *, lends: bool = False
    ) -> None:
        self._lends = lends
        self._run = library.function("ec_run_graph", POINTER)
        self._forward = forward
        self._graph: _Graph | None = None
        self.is_captured: bool | None = None

    def __call__(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> PassResult:
        """See `kernels.interface.operations.Forward`."""
        if self.is_captured is False:
            return self._forward(token_ids_T, positions_T, context)
        num_tokens = token_ids_T.shape[0]
        graph = self._graph
        try:
            if (
                graph is None
                or num_tokens > graph.capacity
                or graph.kv_caches is not context.kv_caches
                or graph.plan_addresses != _plan_addresses(context)
            ):
                graph = self._capture(num_tokens, context)
        except NotCapturable as reason:
            logger.info("the forward pass is not captured, each operation is a call: %s", reason)
            self.is_captured = False
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
        step = graph.step
        step.token_ids = token_ids_T.data_ptr()
        step.positions = positions_T.data_ptr()
        step.num_tokens = num_tokens
        step.num_given = 0
        if (given := context.given) is not None:
            step.num_given, step.given_size = given.rows_NE.shape
            check_tensor("places", given.places_N, (step.num_given,), torch.int64)
            check_tensor("rows", given.rows_NE, given.rows_NE.shape)
            step.given_places = given.places_N.data_ptr()
            step.given_rows = given.rows_NE.data_ptr()
        num_rows, step.output_rows = num_tokens, None
        if graph.takes_rows and (output := context.output) is not None:
            num_rows = len(output.rows_N)
            check_tensor("output rows", output.rows_N, (num_rows,), torch.int64)
            step.output_rows, step.num_output_rows = output.rows_N.data_ptr(), num_rows
            step.output_geometry = native_plan(output.metadata.plan).address
        refusal = self._run(graph.address)
        for call in graph.host_calls if refusal else ():
            if (failure := call.failure) is not None:
                call.failure = None
                raise failure
        check(refusal)
        results = graph.lent.get(num_rows) if self._lends else None
        if results is None:
            # numpy takes a third of the time of torch's slice and copy
            parts = [result[:num_rows] for result in graph.results]
            results = [torch.from_numpy(part if self._lends else part.copy()) for part in parts]
            if self._lends:
                graph.lent[num_rows] = results
        return cast("PassResult", tuple(results) if graph.is_tuple else results[0])

    def _capture(self, num_tokens: int, context: ForwardContext) -> _Graph:
        capacity = max(_LEAST_CAPACITY, 1 << (num_tokens - 1).bit_length())
        if self._graph is not None:
            capacity = max(capacity, self._graph.capacity)
            self._graph = None  # its memory is free before more is taken
        self._graph = _Graph(self._forward, capacity, context)
        self.is_captured = True
        return self._graph


def _plan_addresses(context: ForwardContext) -> list[int]:
    """Where the graph finds the step's plans; NotCapturable for a plan of torch's."""
    return [native_plan(metadata.plan).address for metadata in context.metadata]
