"""Random weights in the tensors that a quantised folder holds."""

import json

import pytest
import torch

from engine_core.model_files import ConfigOnly, UnsupportedModelFile
from engine_core.models.loading import load_dummy_model
from kernels.backends import select_operations

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj.weight"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def compressed(format_name, inputs=None, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    fields = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": groups}
    return fields | {"ignore": ["lm_head", "re:.*o_proj"]}


OF_A_TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
QUANTISED = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-block": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["o_proj"],
    },
    "fp8 by output": compressed(
        "float-quantized", OF_A_TOKEN, type="float", num_bits=8, strategy="channel"
    ),
    "gptq-int4": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    "gptq_v2-int8": {
        "quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq-int4": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "w4a16": compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "w8a8": compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
}  # fmt: skip


def shape_with(folder, fields):
    file = folder / "shape.json"
    file.write_text(json.dumps(SHAPE | {"quantization_config": fields}))
    return file


@pytest.mark.parametrize("name", QUANTISED)
def test_layers_are_drawn_as_their_folders_hold_them(tmp_path, name):
    files = ConfigOnly(shape_with(tmp_path, QUANTISED[name]))
    part = files.random_layers.draw(UP, (256, 128), CPU)
    assert files.quantised_types == {part.type_name} == {name.partition(" ")[0]}
    w = part.dequantise()
    assert w.shape == (256, 128)
    assert abs(w.mean()) < 0.005
    assert 0.01 < w.std() < 0.03
    again = files.random_layers.draw(UP, (256, 128), CPU)
    assert torch.equal(again.dequantise(), w)
    other = files.random_layers.draw(UP.replace("up", "gate"), (256, 128), CPU)
    assert not torch.equal(other.dequantise(), w)


@pytest.mark.parametrize("name", ["fp8-block", "w4a16"])
def test_a_model_is_packed_but_for_what_its_config_and_its_kind_leave_floating(tmp_path, name):
    files = ConfigOnly(shape_with(tmp_path, QUANTISED[name]))
    ops = select_operations("cpu", quantised_types=files.quantised_types, keeps_blocks=True)
    load_dummy_model(
        files.config, dtype=torch.float32, ops=ops, draw_quantised=files.random_layers.draw
    )
    packed = ops.weight_packing(torch.float32)
    if packed is None:
        pytest.skip("no native kernels here")
    num_bytes = packed.bytes_by_format()
    blocks = num_bytes[{"fp8-block": "Q8_0", "w4a16": "Q4_1"}[name]]
    num_weights = 128 * (64 + 64 + 128) + 3 * 128 * 256  # q, k, v; gate, up, down
    assert blocks == pytest.approx(num_weights * (34 if name == "fp8-block" else 20) / 32, rel=0.05)
    assert num_bytes["float32"] >= 4 * 128 * (128 + 2 * 61)  # o_proj and both vocabularies


def test_shapes_without_whole_groups_stay_floating(tmp_path):
    layers = ConfigOnly(shape_with(tmp_path, QUANTISED["awq-int4"])).random_layers
    for shape in ((256, 192), (250, 128), (256,)):
        assert layers.draw(UP, shape, CPU) is None


def test_kinds_that_are_not_drawn_are_refused_by_name(tmp_path):
    fields = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group")
    with pytest.raises(UnsupportedModelFile, match="draws no weights of nvfp4, only FP8, GPTQ"):
        ConfigOnly(shape_with(tmp_path, fields))
