"""The GPU suite's groups of steps, models and the whole engine, rehearsed on a CPU on small sizes.

Kernels run in Triton's interpreter, the daemon on its CPU backend. A check that is itself wrong
would waste the GPU machine's time.
"""

import pytest
import torch

from scripts.gpu.groups import (
    batch_invariance,
    decode_steps,
    end_to_end,
    step_inputs,
    whole_models,
)
from scripts.gpu.model_shapes import QWEN3_SMALL

FLOAT32 = torch.float32
SMALL_STEP = {"max_model_len": 64}
TINY = {
    **QWEN3_SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 100,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def test_step_inputs():
    decodes = step_inputs.Shape(3, 0, **SMALL_STEP)
    assert step_inputs.check(decodes, num_updates=4, device="cpu") == 0
    both = step_inputs.Shape(2, 3, 21, **SMALL_STEP)
    assert step_inputs.check(both, num_updates=6, device="cpu") == 0
    work = step_inputs.prepare(decodes, device="cpu")
    work.call()
    assert work.num_bytes > 0


def test_a_wrong_step_is_seen(monkeypatch):
    monkeypatch.setattr(step_inputs, "append_sampled", lambda *_, **__: None)
    decodes = step_inputs.Shape(20, 0, **SMALL_STEP)
    assert step_inputs.check(decodes, num_updates=1, device="cpu") > 0


def test_a_whole_model_in_float32():
    error = whole_models.check(
        "qwen3-moe",
        FLOAT32,
        use_graphs=True,
        prompt_lengths=(1, 18),
        num_output=2,
        budget=12,
        num_layers=1,
        device="cpu",
    )
    assert error < 1e-4


def test_a_whole_model_in_16_bits_is_compared_with_the_same_in_float32():
    ratio = whole_models.check(
        "llama",
        torch.float16,  # bf16 is no dtype of the interpreter's products
        use_graphs=True,
        prompt_lengths=(3, 7),
        num_output=2,
        budget=6,
        num_layers=1,
        device="cpu",
    )
    assert 0 < ratio < whole_models.HALF_RATIO


def test_a_whole_model_of_quantised_weights():
    error = whole_models.check(
        "llama",
        FLOAT32,
        use_graphs=True,
        prompt_lengths=(3, 7),
        num_output=2,
        budget=6,
        num_layers=1,
        is_quantised=True,
        device="cpu",
    )
    assert error < 1e-4


def test_a_model_with_a_wrong_weight_is_seen(monkeypatch):
    from scripts.gpu import tiny_models

    right = tiny_models.ours_of

    def wrong(reference, ops, *, dtype):
        ours = right(reference, ops, dtype=dtype)
        reference.lm_head.weight.data[5] += 0.1
        return ours

    monkeypatch.setattr(tiny_models, "ours_of", wrong)
    error = whole_models.check(
        "llama",
        FLOAT32,
        use_graphs=False,
        prompt_lengths=(3,),
        num_output=1,
        budget=12,
        num_layers=1,
        device="cpu",
    )
    assert error > whole_models.FLOAT32_ERROR


WAYS = {
    "in a crowd, chunked and cached": (
        batch_invariance.Way(crowd=3, budget=12, is_cached=True),
        batch_invariance.Lengths(prompt=18, output=3),
    ),
    "preempted": (
        batch_invariance.Way(crowd=2, is_preempted=True),
        batch_invariance.Lengths(prompt=30, output=6),
    ),
}


@pytest.mark.parametrize(("way", "lengths"), WAYS.values(), ids=WAYS)
def test_batch_invariance(way, lengths):
    error = batch_invariance.check(
        "llama", FLOAT32, way, lengths=lengths, max_num_seqs=3, num_layers=1, device="cpu"
    )
    assert error == 0


def test_models_of_published_widths():
    shape = TINY | {"vocab_size": 5000}  # which is made small
    error = decode_steps.check(
        shape, dtype=FLOAT32, prompt_lengths=(1, 18), num_output=2, device="cpu"
    )
    assert error < 1e-4


def test_steps_of_a_ready_engine():
    sizes = {"most_seqs": 2, "most_context": 17, "most_prefill": 20, "dtype": FLOAT32}
    decode = decode_steps.prepare_decode("tiny", TINY, 2, 17, device="cpu", **sizes)
    decode.call()
    decode.call()
    assert decode.num_bytes > 0
    assert not decode.fits_graph
    prefill = decode_steps.prepare_prefill("tiny", TINY, 20, device="cpu", **sizes)
    prefill.call()
    prefill.call()
    assert prefill.num_flops > 0
    figures = decode_steps.measure_loop("tiny", TINY, 2, 17, 3, device="cpu", **sizes)
    assert figures["step_ms"] >= figures["host_ms"] > 0
    assert figures["output_tok_s"] > 0


OPTIONS = ("--max-num-seqs", "8", "--max-model-len", "128", "--num-blocks", "64")


def test_the_daemon_serves_every_request_once():
    assert end_to_end.check(TINY, num_requests=12, longest=30, options=OPTIONS, device="cpu") == 0


def test_the_daemon_is_measured():
    figures = end_to_end.measure_daemon(
        TINY, number=6, shortest=3, longest=20, options=OPTIONS, device="cpu"
    )
    assert figures["output_tok_s"] > 0
    assert figures["launch_to_ready_s"] > 0
    assert figures["ready_s"] > 0
    assert figures["load_s"] >= 0


def test_a_daemon_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match=r"not ready .*--block-size"):
        end_to_end.check(TINY, options=("--block-size", "none"), device="cpu")


def test_a_reference_in_16_bits_keeps_its_rotary_frequencies_exact():
    from scripts.gpu.tiny_models import random_reference, tiny_config

    model = random_reference(tiny_config("llama"), dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == FLOAT32
