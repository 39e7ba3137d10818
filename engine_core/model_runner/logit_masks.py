"""From the masks of a plan's sequences to masks of a step's rows of logits."""

import dataclasses

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.plan import TokenMasks

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class RowMasks:
    """`index_M`: the row of logits that each mask is for, none twice. `bits_MW`: int32, see
    `engine_core.scheduler.constraints.MaskRows`."""

    index_M: Int64Array
    bits_MW: npt.NDArray[np.int32]


def logit_masks(masks: TokenMasks, place_S: Int64Array, first_S: Int64Array) -> RowMasks:
    """Waits until the masks are there.

    Args:
        place_S: of each sampled sequence its place in the plan.
        first_S: its first row of logits; one more for each of its drafts is behind it.
    """
    rows = masks.wait()
    first_of_place = np.zeros(place_S.max() + 1, np.int64)
    first_of_place[place_S] = first_S
    return RowMasks(first_of_place[rows.place_M] + rows.offset_M, rows.bits_MW)
