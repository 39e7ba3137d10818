"""What is given of a step, by row. With scheduler and model: gpu/test_prompt_embeds.py."""

import numpy as np
import torch

from engine_core.model_runner.given_states import GivenStates
from engine_core.model_runner.row_parts import StepRows


def step(rows, computed, scheduled):
    return StepRows(
        place_R=np.arange(len(rows)),
        rows_R=np.array(rows),
        num_computed_R=np.array(computed),
        num_scheduled_R=np.array(scheduled),
    )


def test_rows_are_forgotten_once_their_positions_are_computed():
    given = GivenStates(4, torch.float32)
    given.write(2, 3, torch.ones(4, 5))
    given.write(1, 0, torch.zeros(2, 5))
    found = given.of_step(None, step([0, 2, 1], [9, 0, 0], [1, 5, 1]))
    assert np.concatenate(found.places).tolist() == [4, 5, 6]
    assert [len(part) for part in found.parts] == [2, 1]
    found = given.of_step(None, step([2, 1], [5, 1], [9, 1]))
    assert np.concatenate(found.places).tolist() == [0, 1, 9]
    assert given.is_used
    assert given.of_step(None, step([2, 1], [14, 2], [1, 1])) is None
    assert not given.is_used
