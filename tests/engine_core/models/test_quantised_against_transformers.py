"""GPTQ and AWQ folders from the file to the logits, against transformers with the same numbers.

On a GPU's operations (interpreted) the integers are multiplied as they are; on a CPU's, with inputs
rounded to bytes. Without native kernels they are dequantised at load.
"""

import json

import pytest
import torch
import transformers
from other_layers import write_other
from quantised_folders import METHODS, save, write_quantised

from engine_core.errors import StartupError
from engine_core.model_files import open_model_files
from engine_core.models.errors import ModelWeightsError
from engine_core.models.loading import load_model
from engine_core.options.engine import EngineOptions
from engine_core.startup.model import load_any_model
from kernels.cpu.operations import CpuOperations
from kernels.triton.operations import TritonOperations
from tests.engine_core.kept_blocks import as_a_cpu_keeps_it
from tests.native_kernels import native_library_or_skip

CPU = torch.device("cpu")
V = 70
SHAPE = {
    "vocab_size": V,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def reference_of(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


LLAMA = transformers.LlamaConfig(**SHAPE)
QWEN2 = transformers.Qwen2Config(**SHAPE)  # biases on q, k and v

EXPERTS = transformers.Qwen3MoeConfig(
    **SHAPE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=64
)

on_one_cpu = pytest.mark.parametrize("ops", ["torch"], indirect=True)
"""For tests that do not use the operations of a CPU, which `paged_logits` asks for."""


def load(folder, ops):
    files = open_model_files(str(folder), report=print)
    packing = ops.weight_packing(torch.float32)
    tensors = files.tensors(keeps_blocks=packing is not None)
    return load_model(files.config, tensors, dtype=torch.float32, ops=ops, drops_zero_biases=True)


def triton_for(folder):
    types = open_model_files(str(folder), report=print).quantised_types
    return TritonOperations(CPU, quantised_types=types)


_BLOCKS = {"Q4_0", "Q4_1", "Q8_0", "MXFP4"}


def assert_as_kept_on_a_cpu(folder, reference, paged_logits, ops):
    """Where an input lies between two codes the last bits of what came before decide: so the
    distance is held against what rounding inputs costs at all."""
    model = load(folder, ops)
    if ops.weight_packing(torch.float32) is None:
        assert_as_transformers(model, reference, paged_logits, ops)
        return
    assert ops.weight_packing(torch.float32).bytes_by_format().keys() & _BLOCKS
    sequences = [torch.randint(V, (length,)).tolist() for length in (13, 1)]
    ours = torch.cat(paged_logits(model, sequences, on=ops))

    def expected():
        with torch.inference_mode():
            return torch.cat([reference(torch.tensor([each])).logits[0] for each in sequences])

    rounded_inputs = as_a_cpu_keeps_it(reference, folder)
    exact = expected()
    with rounded_inputs:
        rounded = expected()
    by_rounding = (rounded - exact).norm()
    assert 0.001 * exact.norm() < by_rounding < 0.05 * exact.norm()
    assert (ours - rounded).norm() < 0.2 * by_rounding


def assert_as_transformers(model, reference, paged_logits, ops):
    sequences = [torch.randint(V, (length,)).tolist() for length in (13, 1)]
    for ours, tokens in zip(paged_logits(model, sequences, on=ops), sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-4)


@on_one_cpu
@pytest.mark.parametrize("name", METHODS)
def test_integers_multiplied_as_they_are_give_the_logits_of_transformers(
    tmp_path, paged_logits, name
):
    reference = reference_of(QWEN2 if name == "awq" else LLAMA)
    write_quantised(tmp_path, reference, METHODS[name], zero_biases=name == "gptq 4 bits")
    ops = triton_for(tmp_path)
    model = load(tmp_path, ops)
    by_format = ops.weight_packing(torch.float32).bytes_by_format()
    assert len(by_format) == 2
    assert by_format["float32"] == 2 * V * 128 * 4  # embedding and head
    num_linear = 128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256
    (integers,) = (size for key, size in by_format.items() if key != "float32")
    bits = METHODS[name]["bits"]
    assert num_linear * bits / 8 < integers < num_linear * (bits / 8 + 0.3)
    assert_as_transformers(model, reference, paged_logits, ops)


@on_one_cpu
@pytest.mark.parametrize("name", ["gptq 4 bits", "awq"])
def test_experts_stay_as_they_are(tmp_path, paged_logits, name):
    reference = reference_of(EXPERTS)
    write_quantised(tmp_path, reference, METHODS[name])
    ops = triton_for(tmp_path)
    model = load(tmp_path, ops)
    by_format = ops.weight_packing(torch.float32).bytes_by_format()
    assert by_format["float32"] == (2 * V + 3) * 128 * 4  # embedding, head and router
    assert_as_transformers(model, reference, paged_logits, ops)


@on_one_cpu
@pytest.mark.parametrize("name", ["gptq 8 bits", "awq"])
def test_experts_that_a_gpu_leaves_to_the_host_stay_codes(tmp_path, paged_logits, name):
    reference = reference_of(EXPERTS)
    write_quantised(tmp_path, reference, METHODS[name])
    host, ops = CpuOperations(native_library_or_skip()), triton_for(tmp_path)
    ops.leave_experts_to(host, 1)
    model = load(tmp_path, ops)
    blocks = "Q8_0" if METHODS[name]["bits"] == 8 else "Q4_1"
    assert host.weight_packing(torch.float32).bytes_by_format().keys() == {blocks}
    tokens = torch.randint(V, (13,)).tolist()
    (ours,) = paged_logits(model, [tokens], on=ops)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    # their inputs are rounded to bytes
    assert 0 < (ours - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("place", ["whole", "text"])
def test_the_text_of_a_whole_may_be_quantised(tmp_path, paged_logits, ops, place):
    reference = reference_of(QWEN2)
    tensors = write_quantised(tmp_path, reference, METHODS["awq"])
    save(tmp_path, {f"language_model.{name}": tensor for name, tensor in tensors.items()})
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "internvl", "text_config": text}
    if place == "whole":
        config["quantization_config"] = text.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_as_kept_on_a_cpu(tmp_path, reference, paged_logits, ops)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_a_cpu_multiplies_them_with_inputs_in_bytes(tmp_path, paged_logits, ops, name):
    reference = reference_of({"awq": QWEN2, "gptq 8 bits": EXPERTS}.get(name, LLAMA))
    write_quantised(tmp_path, reference, METHODS[name])
    assert_as_kept_on_a_cpu(tmp_path, reference, paged_logits, ops)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("name", ["w4a16 with zeros", "w8a8", "nvfp4", "mxfp4", "bitsandbytes nf4"])
def test_a_cpu_multiplies_others_codes_too(tmp_path, paged_logits, ops, name):
    reference = reference_of(EXPERTS if name in ("w8a8", "nvfp4") else LLAMA)
    write_other(tmp_path, reference, name)
    assert_as_kept_on_a_cpu(tmp_path, reference, paged_logits, ops)


@on_one_cpu
def test_without_their_types_a_gpu_dequantises_them_at_load(tmp_path, paged_logits):
    reference = reference_of(LLAMA)
    write_quantised(tmp_path, reference, METHODS["awq"])
    ops = TritonOperations(CPU)
    assert ops.weight_packing(torch.float32) is None
    assert_as_transformers(load(tmp_path, ops), reference, paged_logits, ops)


def test_transformers_own_code_does_not_get_them(tmp_path):
    write_quantised(tmp_path, reference_of(LLAMA), METHODS["awq"])
    files = open_model_files(str(tmp_path), report=print)
    options = EngineOptions(model=str(tmp_path), dtype="float32", model_impl="transformers")
    with pytest.raises(StartupError, match=r"quantised \(awq-int4\).* unquantised models only"):
        load_any_model(options, files, CPU)


def test_biases_that_no_layer_takes_must_be_zero(tmp_path):
    reference = reference_of(LLAMA)
    tensors = write_quantised(tmp_path, reference, METHODS["gptq 4 bits"], zero_biases=True)
    name = "model.layers.0.mlp.up_proj.bias"
    save(tmp_path, {**tensors, name: tensors[name] + 1})
    with pytest.raises(ModelWeightsError, match=rf"1 tensors have no place in .*{name}"):
        load(tmp_path, TritonOperations(CPU))
