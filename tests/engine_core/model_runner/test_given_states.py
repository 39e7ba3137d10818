"""What is given of a step, by row. With scheduler and model: gpu/test_prompt_embeds.py."""

import numpy as np
import torch

from engine_core.model_runner.given_states import GivenStates


def test_rows_are_forgotten_once_their_positions_are_computed():
    given = GivenStates(4)
    given.write(2, 3, torch.ones(4, 5))
    given.write(1, 0, torch.zeros(2, 5))
    step = given.of_step(np.array([0, 2, 1]), np.array([9, 0, 0]), np.array([1, 5, 1]))
    assert step is not None
    assert step.places_N.tolist() == [4, 5, 6]
    assert [len(part) for part in step.parts] == [2, 1]
    step = given.of_step(np.array([2, 1]), np.array([5, 1]), np.array([9, 1]))
    assert step.places_N.tolist() == [0, 1, 9]
    assert given.of_step(np.array([2, 1]), np.array([14, 2]), np.array([1, 1])) is None
    assert not given._parts
