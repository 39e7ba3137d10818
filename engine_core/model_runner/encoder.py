"""Runs a model's encoder over images and sounds, keeps what it makes as plans say, and gives it to
the tokens of each step."""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.given_states import StepStates
from engine_core.model_runner.rows import RunnerRows
from engine_core.models.multimodal.interface import (
    InputFamily,
    MultiModalEncoder,
    positions_on_axes,
)
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.mm_features import MultiModalFeature

logger = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedStep:
    """Of a step's T tokens, in its order.

    Attributes:
        states: rows in the place of embeddings.
        positions_AT: int64 [3, T]; None: the text's, on all axes.
        ends_T: int32, behind the last position that each token sees; None: itself.
        failures: sequences (places in the step's order) that lack an output, and why.
    """

    states: StepStates | None
    positions_AT: Int64Array | None
    ends_T: Int32Array | None
    failures: dict[int, str]


_ALL_TEXT = EncodedStep(None, None, None, {})


@dataclasses.dataclass(frozen=True, slots=True)
class _RowInputs:
    """Of a sequence."""

    features: tuple[MultiModalFeature, ...]
    positions_AP: Int64Array | None
    """Up to the last input's end."""


class EncoderRows:
    """For `max_num_rows` rows. `encoder`: None if all prompts are text."""

    def __init__(
        self, encoder: MultiModalEncoder | None, rows: RunnerRows, max_num_rows: int
    ) -> None:
        self._encoder = encoder
        self._rows = rows
        self._outputs: dict[bytes, torch.Tensor | str] = {}
        """By identifier; a text says why there is none."""
        self._inputs: dict[int, _RowInputs] = {}
        self._stop: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], behind the last input."""
        self._shift: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row], what positions behind it are less than the tokens' indexes."""

    @property
    def outputs(self) -> Mapping[bytes, torch.Tensor | str]:
        """What plans keep, by identifier; a text says why there is none."""
        return self._outputs

    @property
    def _family(self) -> InputFamily:
        assert self._encoder is not None, "inputs are refused where there is no encoder"
        return self._encoder.family

    def free_row(self, row: int) -> None:
        if self._inputs.pop(row, None) is not None:
            self._stop[row] = self._shift[row] = 0

    def write_row(self, row: int, features: tuple[MultiModalFeature, ...]) -> None:
        """A sequence with these inputs has the row, in place of another."""
        self.free_row(row)
        if features:
            positions_AP: Int64Array | None = None
            if self._family.has_axes:
                positions_AP, self._shift[row] = positions_on_axes(self._family, features)
            self._inputs[row] = _RowInputs(features, positions_AP)
            self._stop[row] = features[-1].stop

    def encode(self, plan: SchedulerOutput) -> None:
        """Drop and make outputs. Each is made on its own, so that nothing else changes its bits,
        and one that cannot be made fails the sequences that need it."""
        for identifier in plan.free_encoder_mm_hashes:
            self._outputs.pop(identifier, None)
        for name, indexes in plan.scheduled_encoder_inputs.items():
            features = self._rows.mm_features_of(name)
            for index in indexes:
                self._outputs[features[index].identifier] = self._encode(features[index])

    def _encode(self, feature: MultiModalFeature) -> torch.Tensor | str:
        assert self._encoder is not None, "inputs are refused where there is no encoder"
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

    def of_step(
        self,
        rows_R: Int64Array,
        num_computed_R: npt.NDArray[np.integer],
        counts_R: npt.NDArray[np.integer],
    ) -> EncodedStep:
        """What the tokens of these sequences take of their inputs."""
        if not self._inputs:
            return _ALL_TEXT
        family = self._family
        starts_R = np.cumsum(counts_R) - counts_R
        places: list[Int64Array] = []
        parts: list[torch.Tensor] = []
        failures: dict[int, str] = {}
        positions_T = np.repeat(num_computed_R - starts_R, counts_R)
        positions_T = positions_T + np.arange(len(positions_T))
        positions_AT = ends_T = None
        if family.has_axes and self._shift[rows_R].any():
            positions_AT = np.tile(positions_T + np.repeat(self._shift[rows_R], counts_R), (3, 1))
        for place in np.flatnonzero(num_computed_R < self._stop[rows_R]).tolist():
            inputs = self._inputs[int(rows_R[place])]
            first, offset = int(num_computed_R[place]), int(starts_R[place])
            stop, shift = first + int(counts_R[place]), offset - first
            if inputs.positions_AP is not None:
                if positions_AT is None:
                    positions_AT = np.tile(positions_T, (3, 1))
                own = inputs.positions_AP[:, first:stop]
                positions_AT[:, offset : offset + own.shape[1]] = own
            for feature in inputs.features:
                output, row = self._outputs.get(feature.identifier), 0
                for run_start, run_stop in feature.runs:
                    low, high = max(first, run_start), min(stop, run_stop)
                    if low < high and not isinstance(output, str):
                        assert output is not None, "the plan encodes what it computes"
                        places.append(np.arange(low, high) + shift)
                        parts.append(output[row + low - run_start : row + high - run_start])
                    elif low < high and isinstance(output, str):
                        failures[place] = output
                    if low < high and family.is_bidirectional:
                        if ends_T is None:
                            ends_T = (positions_T + 1).astype(np.int32)
                        ends_T[low + shift : high + shift] = run_stop
                    row += run_stop - run_start
        states = StepStates(np.concatenate(places), parts) if places else None
        return EncodedStep(states, positions_AT, ends_T, failures)
