"""GPTQ and AWQ folders: their numbers, and what of them is refused by name."""

import json

import pytest
import torch
from quantised_folders import METHODS, make_model, opened, save, write_quantised

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile
from kernels.interface.weights import QuantisedTensor

LAYER = "model.layers.0.self_attn.k_proj"
GPTQ = METHODS["gptq 4 bits"]
AWQ = METHODS["awq"]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_weights_are_the_numbers_that_were_written(tmp_path, name, num_shards):
    model = make_model()
    write_quantised(tmp_path, model, METHODS[name], num_shards=num_shards)
    files = opened(tmp_path)
    (type_name,) = files.quantised_types
    expected = model.state_dict()
    plain = dict(files.tensors())
    kept = dict(files.tensors(keeps_blocks=True))
    assert plain.keys() == kept.keys() == expected.keys()
    num_kept = 0
    for key, tensor in plain.items():
        assert torch.equal(tensor, expected[key]), key
        if isinstance(kept[key], QuantisedTensor):
            num_kept += 1
            assert kept[key].type_name == type_name
            assert kept[key].shape == tuple(expected[key].shape)
            assert torch.equal(kept[key].dequantise(), expected[key])
    assert num_kept == 7


@pytest.mark.parametrize("name", METHODS)
def test_ranks_take_whole_words_of_outputs_and_any_32_inputs(tmp_path, name):
    write_quantised(tmp_path, make_model(), METHODS[name])
    part = dict(opened(tmp_path).tensors(keeps_blocks=True))["model.layers.0.mlp.down_proj.weight"]
    whole = part.dequantise()  # [128, 256]
    assert torch.equal(part.narrow(0, 8, 72).dequantise(), whole[8:72])
    for start in (128, 192, 96):  # between groups, or within some: all become smaller
        columns = part.narrow(1, start, 256)
        assert columns.shape == (128, 256 - start)
        assert torch.equal(columns.dequantise(), whole[:, start:])
        assert torch.equal(columns.narrow(0, 16, 24).dequantise(), whole[16:24, start:])
        assert torch.equal(columns.narrow(1, 32, 64).dequantise(), whole[:, start:][:, 32:64])
    assert part.narrow(0, 3, 72) is None
    assert part.narrow(0, 0, 72, num_zeros=1) is None
    assert part.narrow(1, 16, 256) is None


def test_names_of_types_say_layout_and_bits_and_plain_folders_have_none(tmp_path):
    model = make_model()
    names = set()
    for how in METHODS.values():
        write_quantised(tmp_path, model, how)
        files = opened(tmp_path)
        assert "quantization_config" not in files.config
        names |= files.quantised_types
    assert names == {"gptq-int4", "gptq-int8", "gptq_v2-int4", "awq-int4"}
    model.save_pretrained(tmp_path / "plain")
    assert opened(tmp_path / "plain").quantised_types == frozenset()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quant_method": "spqr"}, "quantised with spqr, which"),
        ({"bits": 4}, "an unnamed method"),
        ({**GPTQ, "bits": 3}, "gptq in 3 bits, not in 4 or 8"),
        ({**AWQ, "bits": 8}, "awq in 8 bits, not in 4"),
        ({**GPTQ, "group_size": 16}, "groups of 16 inputs, not of 32, 64, 128"),
        ({**GPTQ, "desc_act": True}, r"\(desc_act\)"),
        ({**GPTQ, "checkpoint_format": "marlin"}, 'layout "marlin"'),
        ({**GPTQ, "is_marlin_format": True}, 'layout "marlin"'),
        ({**GPTQ, "pack_dtype": "int8"}, "words of int8"),
        ({**GPTQ, "dynamic": {"-:.*down": {}}}, r"\(dynamic\)"),
        ({**AWQ, "version": "gemv"}, 'layout "gemv", not "gemm"'),
        ({**AWQ, "zero_point": False}, "without zero points"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_what_to_do(tmp_path, how, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    with pytest.raises(UnsupportedModelFile, match=message + ".*; (use|convert it, or use) "):
        opened(tmp_path)


@pytest.fixture
def tensors(tmp_path):
    return write_quantised(tmp_path, make_model(), GPTQ)


def test_a_folder_without_integers_is_of_another_layout(tmp_path, tensors):
    save(tmp_path, make_model().state_dict())
    with pytest.raises(UnsupportedModelFile, match="no tensor is called qweight"):
        opened(tmp_path)


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path, tensors):
    del tensors[f"{LAYER}.scales"]
    save(tmp_path, tensors)
    with pytest.raises(BrokenModelFile, match=f"lacks scales of the quantised layer {LAYER}"):
        opened(tmp_path)


def test_inputs_in_an_order_of_their_own_are_refused_by_name(tmp_path, tensors):
    tensors[f"{LAYER}.g_idx"] = tensors[f"{LAYER}.g_idx"].flip(0)
    save(tmp_path, tensors)
    with pytest.raises(UnsupportedModelFile, match=rf"{LAYER} .*\(g_idx\)"):
        dict(opened(tmp_path).tensors())


@pytest.mark.parametrize(
    ("suffix", "wrong", "message"),
    [
        ("scales", torch.ones(3, 32), r"need .*scales \[4, 32\]"),
        ("qzeros", torch.zeros(4, 5, dtype=torch.int32), r"need qzeros \[4, 4\]"),
        ("qweight", torch.zeros(16, 32), r"qweight is torch\.float32"),
        ("qweight", torch.zeros(16, dtype=torch.int32), r"int32 \[16\]"),
        ("qweight", torch.zeros(15, 32, dtype=torch.int32), "120 inputs in groups of 32"),
    ],
)
def test_shapes_that_contradict_each_other_are_named(tmp_path, tensors, suffix, wrong, message):
    tensors[f"{LAYER}.{suffix}"] = wrong
    save(tmp_path, tensors)
    with pytest.raises(BrokenModelFile, match=f"{LAYER}: .*{message}"):
        dict(opened(tmp_path).tensors())
