"""The daemon over its socket: every request ends once, whatever others do; token ids only."""

import random

import pytest
import torch

from tests.gpu.daemon_run import ClientRequest, DaemonRun, is_wrong
from tests.gpu.device import on_gpu
from tests.gpu.model_shapes import PUBLISHED

SMALL_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL_SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TINY = PUBLISHED["Qwen3-0.6B"] | SMALL_SHAPE | {"vocab_size": 100}
TINY_OPTIONS = ("--max-num-seqs", "8", "--max-model-len", "128", "--num-blocks", "64")
# few blocks: other tests share the device
OPTIONS = ("--max-num-seqs", "256", "--max-model-len", "4096", "--num-blocks", "4096")
OPTIONS += ("--max-num-batched-tokens", "8192")
TWO_LAYERS = PUBLISHED["Qwen3-0.6B"] | {"num_hidden_layers": 2}
# blocks for a dozen of sequences: the others are preempted, and come back from host memory
SWAPPING = ("--max-num-seqs", "64", "--max-model-len", "1024", "--num-blocks", "300")
SWAPPING += (
    "--kv-cache-dtype",
    "fp8",
    "--host-cache-memory",
    "256MiB",
    "--preemption-mode",
    "swap",
)


def random_requests(vocab_size, number, longest):
    """Of every fifth the client goes away."""
    draw = random.Random(int(torch.randint(2**31, ())))
    requests = []
    for at in range(number):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(1, longest))]
        num_output = draw.randint(1, longest)
        leave_after = draw.randint(1, num_output) if at % 5 == 0 else None
        requests.append(ClientRequest(prompt, num_output, leave_after))
    return requests


@pytest.mark.parametrize(
    ("shape", "options", "number", "longest"),
    [
        pytest.param(TINY, TINY_OPTIONS, 12, 30, id="tiny"),
        on_gpu(TWO_LAYERS, OPTIONS, 60, 300, id="Qwen3"),
        on_gpu(TWO_LAYERS, SWAPPING, 60, 300, id="Qwen3 fp8 swapped"),
    ],
)
def test_every_request_ends_once_also_beside_clients_that_go_away(
    shape, options, number, longest, device
):
    requests = random_requests(shape["vocab_size"], number, longest)
    with DaemonRun(shape, device=device, options=options) as daemon:
        seen = daemon.serve(requests)
        # behind those that went away
        seen += daemon.serve(requests[1:5])
        assert daemon.statistics().num_compilations_after_ready == 0
        assert daemon.stop() == 0
    pairs = zip([*requests, *requests[1:5]], seen, strict=True)
    assert not [pair for pair in pairs if is_wrong(*pair, shape["vocab_size"])]


def test_a_daemon_that_does_not_start_says_why(device):
    with (
        pytest.raises(RuntimeError, match=r"not ready .*--block-size"),
        DaemonRun(TINY, device=device, options=("--block-size", "none")),
    ):
        pass
