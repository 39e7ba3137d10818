"""Folders of compressed-tensors, ModelOpt, bitsandbytes and auto-round: their numbers, and what is
refused by name."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import other_layers
import pytest
import torch
from float8_folders import RECIPES, write_float8
from other_layers import CONFIGS, TYPES, write_other
from quantised_folders import make_model, opened, save
from recorded_by_compressed_tensors import CASES, config_of, made

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile
from kernels.interface.weights import QuantisedTensor
from kernels.triton.operations import TritonOperations
from tests.engine_core.kept_blocks import meant
from tests.kernels.triton.linear.test_grouped_codes import NF4

RECORDED = json.loads((Path(__file__).parents[1] / "compressed_tensors.json").read_text())
LAYER = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_the_numbers_that_were_written(tmp_path, name):
    model = make_model()
    write_other(tmp_path, model, name, num_shards=2)
    files = opened(tmp_path)
    assert files.quantised_types == {TYPES.get(name, name)}
    expected = model.state_dict()
    kept = dict(files.tensors(keeps_blocks=True))
    plain = dict(files.tensors())
    assert plain.keys() == kept.keys() == expected.keys()
    parts = {key: part for key, part in kept.items() if isinstance(part, QuantisedTensor)}
    assert len(parts) == 7
    for key, part in parts.items():
        assert part.shape == tuple(expected[key].shape)
        torch.testing.assert_close(part.dequantise(), expected[key], rtol=1e-6, atol=1e-7)
        assert torch.equal(plain[key], part.dequantise())
        exact = expected[key].view(len(expected[key]), -1, 32)
        # nibbles of float4 and of tables become bytes, of a block's or of a table's largest
        step = exact.abs().amax(-1, keepdim=True).clamp(min=exact.abs().amax() * 0.3) / 127
        away = (meant(part).view(exact.shape) - exact).abs() / step
        assert away.max() < (0.65 if part.blocks == "Q8_0" else 0.2)
    rows, part = torch.tensor([5, 2, 120]), parts["model.layers.0.mlp.down_proj.weight"]
    if part.has_rows:
        assert torch.equal(part.rows(rows).dequantise(), part.dequantise()[rows])
    columns = part.narrow(1, 128, 256).narrow(0, 8, 80)
    assert torch.equal(columns.dequantise(), part.dequantise()[8:80, 128:])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_keeps_their_codes(tmp_path, name, monkeypatch):
    """Its packing, in float32; of bitsandbytes' fp4 the numbers."""
    monkeypatch.setattr(other_layers, "NF4", np.array(NF4, np.float32))
    write_other(tmp_path, make_model(), name)
    files = opened(tmp_path)
    ops = TritonOperations(torch.device("cpu"), quantised_types=files.quantised_types)
    part = dict(files.tensors(keeps_blocks=True))[f"{LAYER}.weight"]
    if (packing := ops.weight_packing(torch.float32)) is None:
        assert files.quantised_types == {"bnb-fp4"}
        return
    weight = packing.pack(LAYER, [part])
    assert packing.bytes_by_format().keys() == files.quantised_types
    numbers, expected = ops.embedding(torch.arange(part.shape[0]), weight), part.dequantise()
    away = 1 / 8192 if name == "bitsandbytes nf4" else 1e-6
    assert (numbers - expected).abs().max() <= away * expected.abs().max()


def as_tensor(dtype, shape, digits):
    octets = torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
    return octets.view(getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_read_as_the_package_reads_what_it_wrote(tmp_path, name):
    layer = {suffix: as_tensor(*tensor) for suffix, tensor in RECORDED[name].items()}
    expected = layer.pop("")
    save(tmp_path, {f"a.{suffix}": tensor for suffix, tensor in layer.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of(name)}))
    ((key, weight),) = opened(tmp_path).tensors()
    assert key == "a.weight"
    # of nvfp4 the package gives bfloat16
    assert torch.equal(weight.bfloat16().float() if name == "nvfp4" else weight, expected)


def test_what_is_recorded_is_what_the_package_makes():
    pytest.importorskip("compressed_tensors")
    for name, layer in made().items():
        assert layer.keys() == RECORDED[name].keys()
        for suffix, tensor in layer.items():
            assert torch.equal(tensor.float(), as_tensor(*RECORDED[name][suffix]).float())


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ],
)
def test_float8_of_modelopt_and_of_fbgemm_is_float8(tmp_path, how):
    model = make_model()
    is_static = how["quant_method"] == "modelopt"
    name = "fp8 by tensor, static" if is_static else "compressed-tensors by channel"
    write_float8(tmp_path, model, dataclasses.replace(RECIPES[name], config=how))
    files = opened(tmp_path)
    assert files.quantised_types == {"fp8"}
    kept = dict(files.tensors(keeps_blocks=True))[f"{LAYER}.weight"]
    assert ("input_scale" in kept.arrays) == is_static
    assert torch.equal(kept.dequantise(), model.get_parameter(f"{LAYER}.weight"))


def test_hf_quant_config_says_what_config_does_not(tmp_path):
    model = make_model()
    write_other(tmp_path, model, "modelopt nvfp4")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert opened(tmp_path).quantised_types == {"nvfp4"}


def test_rows_that_part_blocks_of_bitsandbytes_are_read_as_numbers(tmp_path):
    from engine_core.model_files.bitsandbytes import read_bitsandbytes

    state = {"blocksize": 64, "shape": [4, 48]}
    name = "weight.quant_state.bitsandbytes__nf4"
    octets = torch.arange(96, dtype=torch.uint8)[:, None]
    arrays = {"weight": octets, "weight.quant_map": torch.arange(16.0)}
    arrays |= {"weight.absmax": torch.tensor([1.0, 10.0, 100.0])}
    arrays[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    weight = read_bitsandbytes(CONFIGS["bitsandbytes nf4"]).as_one(LAYER, arrays)
    codes = torch.stack((octets >> 4, octets & 15), -1).flatten().float()
    scales = torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(64)
    assert torch.equal(weight, (codes * scales).view(4, 48))


def changed(name, **fields):
    config = json.loads(json.dumps(CONFIGS[name]))
    weights = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else {}
    weights |= {key: value for key, value in fields.items() if key in weights}
    return config | {key: value for key, value in fields.items() if key not in weights}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quant_method": "aqlm"}, "quantised with aqlm, which is not read"),
        ({"quant_method": "exl2"}, "exl2, .* ExLlama's own"),
        ({"quant_method": "torchao"}, "torchao, .* with compressed-tensors"),
        ({"quant_method": "hqq"}, "hqq, .* compressed-tensors"),
        (changed("w4a16", num_bits=2), "in 2 bits of type int in 'pack-quantized'"),
        (changed("w4a16", format="marlin-24"), "in the format 'marlin-24'"),
        (changed("w4a16", sparsity_config={"format": "sparse-24-bitmask"}), "and sparse"),
        (changed("nvfp4", strategy="group"), "by group in 'nvfp4-pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "by NVFP4_AWQ, not FP8 or NVFP4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
         "in the type int4, not nf4, fp4 or 8 bits"),
        ({**CONFIGS["auto-round"], "packing_format": "mlx"}, "in the packing 'mlx'"),
        ({**CONFIGS["auto-round"], "extra_config": {"a.b": {"bits": 8}}}, "with bits 8 for a.b"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name_with_what_to_do(tmp_path, how, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    with pytest.raises(UnsupportedModelFile, match=message + ".*(use|save)"):
        opened(tmp_path)


def test_mlx_is_refused_by_its_own_name(tmp_path):
    how = {"group_size": 64, "bits": 4}
    config = {"quantization": how, "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelFile, match=r"quantised with mlx, .* of Apple's library: use"
    ):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "suffix", "wrong", "message"),
    [
        ("w4a16", "weight_packed", torch.ones(3, 3), r"float32 \[3, 3\], not int32 \[32, 16\]"),
        ("w4a16", "weight_scale", torch.ones(32, 3), r"not \[32, groups\] of whole groups of 128"),
        ("w8a8", "weight", torch.ones(32, 128), "weight is torch.float32"),
        ("nvfp4", "weight_scale", torch.ones(32, 8), r"float8_e4m3fn \[32, 8\]"),
        ("mxfp4", "weight_scale", torch.ones(32, 3).byte(), r"uint8 \[32, 4\]"),
        ("bitsandbytes int8", "SCB", torch.ones(3), "SCB has 3 numbers"),
        ("bitsandbytes nf4", "weight.absmax", torch.ones(3), "2048 bytes and 3 scales"),
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", torch.ones(3).byte(),
         "says not how"),
    ],
)  # fmt: skip
def test_shapes_that_contradict_each_other_are_named(tmp_path, name, suffix, wrong, message):
    tensors = write_other(tmp_path, make_model(), name)
    tensors[f"{LAYER}.{suffix}"] = wrong
    save(tmp_path, tensors)
    with pytest.raises(BrokenModelFile, match=f"{LAYER}: .*{message}"):
        dict(opened(tmp_path).tensors())


IN_ORDER = torch.arange(128) // 64


@pytest.mark.parametrize("order", [-torch.ones(128), IN_ORDER, IN_ORDER.flip(0)])
def test_inputs_in_an_order_of_their_own_are_refused_by_name(tmp_path, order):
    tensors = write_other(tmp_path, make_model(), "w4a16")
    save(tmp_path, {**tensors, f"{LAYER}.weight_g_idx": order.int()})
    if order[0] < 1:
        assert f"{LAYER}.weight" in dict(opened(tmp_path).tensors())
        return
    with pytest.raises(UnsupportedModelFile, match=rf"{LAYER} .*\(weight_g_idx\).*actorder"):
        dict(opened(tmp_path).tensors())
