"""Runs a model's encoder over images and sounds, keeps what it makes as plans say, and gives it to
the tokens of each step."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.given_states import StepStates
from engine_core.model_runner.row_parts import Int32Array, Int64Array, RowPart, StepRows
from engine_core.model_runner.rows import PlacedRow, RunnerRows
from engine_core.models.multimodal.interface import (
    InputFamily,
    MultiModalEncoder,
    positions_on_axes,
)
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.records.prompt_content import MultiModalFeature
from kernels.interface.operations import ForwardContext
from kernels.interface.special_inputs import GivenRows

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedStep(StepStates):
    """What the tokens of a step take of encoded inputs: states in the place of embeddings, and

    Attributes:
        added: what is added to the output of the first layers, [N, E] each, by part and layer.
        positions_AT: int64 [3, T]; None: the text's, on all axes.
        ends_T: behind the last position that each token sees; None: itself.
        failures: requests that lack an output, and why.
        shifts_R, fits_graphs: see `StepPart`.
    """

    added: list[tuple[torch.Tensor, ...]]
    positions_AT: Int64Array | None
    ends_T: Int32Array | None
    failures: dict[str, str]
    shifts_R: Int64Array | None = None
    fits_graphs: bool = False

    def in_context(self, context: ForwardContext) -> ForwardContext:
        context = super().in_context(context)
        if self.added and self.added[0]:
            assert context.given is not None
            places_N = context.given.places_N[-sum(map(len, self.places)) :]
            layers = [
                torch.cat(parts).to(places_N.device, self.dtype)
                for parts in zip(*self.added, strict=True)
            ]
            added = tuple(GivenRows(places_N, rows_NE) for rows_NE in layers)
            context = dataclasses.replace(context, added=added)
        if self.positions_AT is None:
            return context
        positions_AT = torch.from_numpy(self.positions_AT)
        positions_AT = positions_AT.to(context.ops.device, non_blocking=True)
        return dataclasses.replace(context, positions_AT=positions_AT)


@dataclasses.dataclass(frozen=True, slots=True)
class _RowInputs:
    """Multimodal inputs of one sequence, with the positions of its tokens."""

    features: tuple[MultiModalFeature, ...]
    positions_AP: Int64Array | None
    """Positions up to the last input's end; None: they are the text's."""


class EncoderRows(RowPart):
    """The images and sounds of each row.

    Args:
        encoder: the config's.
        in_order: of a device that runs ahead, see `DeviceQueue`; None: the host computes.
    """

    def __init__(
        self,
        config: RunnerConfig,
        encoder: MultiModalEncoder,
        rows: RunnerRows,
        in_order: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._encoder = encoder
        self._rows = rows
        self._dtype, self._hidden_size = config.dtype, config.model.spec.hidden_size
        self._shifts_on_device = in_order is not None
        self._in_order = in_order or nullcontext
        max_num_rows = config.max_num_seqs
        self._outputs: dict[bytes, torch.Tensor | str] = {}
        """Encoder outputs by identifier; a text says why there is none."""
        self._inputs: dict[int, _RowInputs] = {}
        self._stop: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], behind the last input."""
        self._shift: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], what positions behind it are less than the tokens' indexes."""

    @property
    def outputs(self) -> Mapping[bytes, torch.Tensor | str]:
        """Encoder outputs that plans keep, by identifier; a text says why there is none."""
        return self._outputs

    @property
    def is_used(self) -> bool:
        return bool(self._inputs)

    @property
    def _family(self) -> InputFamily:
        return self._encoder.family

    def free(self, row: int) -> None:
        if self._inputs.pop(row, None) is not None:
            self._stop[row] = self._shift[row] = 0

    def place(self, placed: PlacedRow) -> None:
        row, features = placed.row, placed.request.mm_features
        self.free(row)
        if features:
            positions_AP: Int64Array | None = None
            if self._family.has_axes:
                positions_AP, self._shift[row] = positions_on_axes(self._family, features)
            self._inputs[row] = _RowInputs(features, positions_AP)
            self._stop[row] = features[-1].stop

    def update(self, plan: SchedulerOutput) -> None:
        """Drop and make outputs. Each is made on its own, so that nothing else changes its bits,
        and one that cannot be made fails the sequences that need it."""
        for identifier in plan.free_encoder_mm_hashes:
            self._outputs.pop(identifier, None)
        for name, indexes in plan.scheduled_encoder_inputs.items():
            features = self._rows.requests[name].mm_features
            for index in indexes:
                with self._in_order():
                    self._outputs[features[index].identifier] = self._encode(features[index])

    def _encode(self, feature: MultiModalFeature) -> torch.Tensor | str:
        try:
            rows_NE = self._encoder.encode(feature.tensors)
        except Exception as error:  # code of others, on tensors of others: one request's fault
            logger.warning("an input of type %s cannot be encoded", feature.modality, exc_info=True)
            return f"the model's encoder fails for an input of type {feature.modality!r}: {error}"
        if len(rows_NE) != feature.num_rows:
            return (
                f"the model's encoder makes {len(rows_NE)} rows of an input of type "
                f"{feature.modality!r}, the prompt has places for {feature.num_rows}; send the "
                "tensors and places of the model's own processor"
            )
        return rows_NE

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> EncodedStep:
        family, rows_R, starts_R = self._family, rows.rows_R, rows.offsets()
        num_computed_R, counts_R = rows.num_computed_R, rows.num_scheduled_R
        places: list[Int64Array] = []
        parts: list[torch.Tensor] = []
        added: list[tuple[torch.Tensor, ...]] = []
        failures: dict[str, str] = {}
        positions_T = np.repeat(num_computed_R - starts_R, counts_R)
        positions_T = positions_T + np.arange(len(positions_T))
        positions_AT: Int64Array | None = None
        ends_T: Int32Array | None = None
        shifts_R: Int64Array = self._shift[rows_R]
        axis_T = positions_T
        if has_shifts := bool(shifts_R.any()):
            axis_T = positions_T + np.repeat(shifts_R, counts_R)
            if not self._shifts_on_device:
                positions_AT = np.tile(axis_T, (3, 1))
        for index in np.flatnonzero(num_computed_R < self._stop[rows_R]).tolist():
            inputs = self._inputs[int(rows_R[index])]
            first, offset = int(num_computed_R[index]), int(starts_R[index])
            stop, shift = first + int(counts_R[index]), offset - first
            if inputs.positions_AP is not None:
                if positions_AT is None:
                    positions_AT = np.tile(axis_T, (3, 1))
                own = inputs.positions_AP[:, first:stop]
                positions_AT[:, offset : offset + own.shape[1]] = own
            for feature in inputs.features:
                output, row = self._outputs.get(feature.identifier), 0
                for run_start, run_stop in feature.runs:
                    low, high = max(first, run_start), min(stop, run_stop)
                    if low < high and not isinstance(output, str):
                        assert output is not None, "the plan encodes what it computes"
                        places.append(np.arange(low, high) + shift)
                        wide = output[row + low - run_start : row + high - run_start]
                        rows_NE, *of_layers = wide.chunk(1 + family.num_added_layers, dim=1)
                        parts.append(rows_NE)
                        added.append(tuple(of_layers))
                    elif low < high and isinstance(output, str):
                        failures[plan.batch.req_ids[rows.place_R[index]]] = output
                    if low < high and family.is_bidirectional:
                        if ends_T is None:
                            ends_T = (positions_T + 1).astype(np.int32)
                        ends_T[low + shift : high + shift] = run_stop
                    row += run_stop - run_start
        return EncodedStep(
            places,
            parts,
            self._dtype,
            added=added,
            positions_AT=positions_AT,
            ends_T=ends_T,
            failures=failures,
            shifts_R=shifts_R if has_shifts else None,
            fits_graphs=not parts and positions_AT is None and ends_T is None,
        )

    def of_dummy(self, num_tokens: int) -> EncodedStep | None:
        if not num_tokens:
            return None
        family = self._family
        rows_NE = torch.zeros(1, 1).expand(num_tokens, self._hidden_size)
        return EncodedStep(
            [np.arange(num_tokens)],
            [rows_NE],
            self._dtype,
            added=[(rows_NE,) * family.num_added_layers],
            positions_AT=np.zeros((3, num_tokens), np.int64) if family.has_axes else None,
            ends_T=np.ones(num_tokens, np.int32) if family.is_bidirectional else None,
            failures={},
        )
