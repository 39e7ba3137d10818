"""A step's inputs made on the device: row updates, the gather, sampled tokens appended."""

import pytest

from tests.gpu.checks import step_inputs
from tests.gpu.checks.step_inputs import Shape
from tests.gpu.device import on_gpu

FEW_DECODES = Shape(3, 0, max_model_len=64)


@pytest.mark.parametrize(
    ("shape", "num_updates"),
    [
        (FEW_DECODES, 4),
        (Shape(2, 3, 21, max_model_len=64), 6),
        (Shape(1, 2, 1025, max_model_len=2100), 5),
        (Shape(140, 0, max_model_len=64), 140),  # more updates than programs
        on_gpu(Shape(1, 0), 1),
        on_gpu(Shape(64, 0), 20),
        on_gpu(Shape(256, 0), 200),
        on_gpu(Shape(1024, 0), 600),
        on_gpu(Shape(0, 3, 2051), 3),
        on_gpu(Shape(100, 9, 300), 50),
    ],
)
def test_inputs_of_a_step_are_those_of_the_torch_backend(shape, num_updates, device):
    assert step_inputs.check(shape, num_updates=num_updates, device=device) == 0


def test_a_wrong_step_is_seen(monkeypatch, device):
    monkeypatch.setattr(step_inputs, "append_sampled", lambda *_, **__: None)
    decodes = Shape(20, 0, max_model_len=64)
    assert step_inputs.check(decodes, num_updates=1, device=device) > 0
