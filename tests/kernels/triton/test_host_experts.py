"""Experts that a GPU's operations leave to the host, against the torch backend's, in steps of
growing and shrinking sizes."""

from functools import partial

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.weights import ExpertRouting
from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations
from tests.gpu.device import DEVICE
from tests.native_kernels import native_library_or_skip

NUM_EXPERTS, WIDTH, FEATURES = 6, 36, 22
VECTORS = {"bias_X": torch.arange(6.0) / 9, "scale_X": torch.arange(6.0) - 2}
ROUTINGS = {
    "softmax": partial(ExpertRouting, top_k=2, renormalise=True),
    "rounded": partial(ExpertRouting, top_k=3, renormalise=False, weights_dtype=torch.bfloat16),
    "sigmoid, bias and scales": partial(
        ExpertRouting, top_k=3, renormalise=True, scores="sigmoid", scale=2.5
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_travel_and_weights_do_not(name, dtype):
    torch.set_default_device(None)  # a host has both
    torch.manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * FEATURES, WIDTH).to(dtype) / 6
    down = torch.randn(NUM_EXPERTS, WIDTH, FEATURES).to(dtype) / 5
    biases = tuple(torch.randn(NUM_EXPERTS, n).to(DEVICE, dtype) for n in (2 * FEATURES, WIDTH))
    host = CpuOperations(native_library_or_skip())
    ops = TritonOperations(torch.device(DEVICE))
    ops.leave_experts_to(host, 3)
    assert ops.weight_packing(dtype) is None
    assert ops.weight_packing(dtype, experts="model.layers.3.mlp") is None
    packing = ops.weight_packing(dtype, experts="model.layers.2.mlp")
    parts = [half for each in gate_up for half in each.chunk(2)]
    experts = packing.pack_experts("model.layers.2.mlp", parts, list(down), "swiglu_oai", biases)
    torch_ops = TorchOperations()
    wide = [each.float() for each in (gate_up, down)]
    expected_of = partial(
        torch_ops.mixture_of_experts,
        experts=torch_ops.prepare_experts(
            *wide, "swiglu_oai", tuple(each.float().cpu() for each in biases)
        ),
    )
    vectors = VECTORS if "bias" in name else {}
    for num_tokens in (3, 70, 1):
        x, logits = (torch.randn(num_tokens, n).to(DEVICE, dtype) for n in (WIDTH, NUM_EXPERTS))
        on_device = {key: each.to(DEVICE) for key, each in vectors.items()}
        out = ops.mixture_of_experts(x, logits, experts, ROUTINGS[name](**on_device))
        assert (out.dtype, out.shape, out.device) == (dtype, x.shape, x.device)
        routing = ROUTINGS[name](**vectors | {"weights_dtype": torch.float32})
        expected = expected_of(x.float().cpu(), logits.float().cpu(), routing=routing)
        torch.testing.assert_close(out.cpu(), expected.to(dtype), rtol=1e-4, atol=1e-5)
