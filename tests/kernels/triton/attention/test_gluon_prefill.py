"""The Gluon kernel of prompts, its source run by threads (see `gluon_threads`), against the
specification; on a GPU the kernel itself is checked by tests/gpu."""

import pytest
import torch

from kernels.triton.attention import gluon_prefill
from kernels.triton.attention.work import AttentionVariant
from tests.gpu.checks import attention
from tests.gpu.checks.paged_step import Heads
from tests.kernels import gluon_threads

IN_GLUON = AttentionVariant(prompts_in_gluon=True)
LLAMA = Heads(num_query_heads=4, num_kv_heads=1, head_size=128)
SMOL = Heads(num_query_heads=6, num_kv_heads=2, head_size=64, dtype=torch.float16, block_size=128)
WINDOW = Heads(num_query_heads=4, num_kv_heads=2, head_size=64, sliding_window=150)


@pytest.fixture
def launched(monkeypatch):
    """Grids of the launches that go to the simulated kernel."""
    simulated, grids = gluon_threads.load(gluon_prefill), []

    def launch(tensors, options, prepare):
        grid, numbers, constants = prepare()
        launch_options = ("num_warps", "launch_pdl")
        constants = {name: constants[name] for name in constants if name not in launch_options}
        kernel = simulated.gluon_prefill_kernel
        gluon_threads.launch(kernel, grid, tensors, *numbers, **constants)
        grids.append(grid)

    monkeypatch.setattr(gluon_prefill, "takes", lambda call: True)
    monkeypatch.setattr(gluon_prefill, "launches", launch)
    return grids


@pytest.mark.parametrize(
    ("heads", "prefills", "options"),
    [
        (LLAMA, [(2, 2), (31, 31), (400, 70), (129, 128)], {}),
        (SMOL, [(300, 45), (128, 128)], {"with_sinks": True}),
        (WINDOW, [(700, 70), (40, 40)], {"with_sinks": True}),
        (LLAMA, [(1030, 40), (2500, 5)], {"with_sinks": True}),  # splits, one of which sees nothing
    ],
)
def test_prompts_in_gluon_are_those_of_the_specification(heads, prefills, options, launched):
    error = attention.check(heads, [], prefills, device="cpu", variant=IN_GLUON, **options)
    assert error <= attention.ROUNDING
    assert launched
