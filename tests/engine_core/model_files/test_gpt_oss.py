"""gpt-oss in MXFP4, from a folder as published and from llama.cpp's file: transformers' numbers."""

import json

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine_core.model_files import BrokenModelFile, open_model_files
from engine_core.models.loading import load_model
from kernels.cpu.operations import CpuOperations
from kernels.triton.operations import TritonOperations
from tests.engine_core.distributed.rank_models import paged_logits as rank_logits
from tests.engine_core.distributed.rank_processes import RankProcesses
from tests.engine_core.model_files.converted import converter_names
from tests.engine_core.models.decoder_cases import full_logits, random_model, sequences
from tests.engine_core.rounded_activations import in_bytes
from tests.native_kernels import native_library_or_skip

X, E, F = 4, 64, 96
CONFIG = transformers.GptOssConfig(
    vocab_size=131,
    hidden_size=E,
    intermediate_size=F,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=X,
    num_experts_per_tok=2,
    sliding_window=7,
    max_position_embeddings=512,
    initializer_range=0.2,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
)
LENGTHS = (25, 1, 19)


def published():
    """(transformers' model, the tensors of a published folder): their numbers are equal."""
    model = random_model(CONFIG)
    tensors = dict(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        num_inputs, num_outputs = tensors.pop(name).shape[1:]
        shape = (X, num_outputs, num_inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
        scales = torch.randint(118, 123, shape, generator=generator).byte()
        weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(weight)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return model, {name: each.clone() for name, each in tensors.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt-oss")
    _, tensors = published()
    config = CONFIG.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "float32"}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def llama_cpp_file(write_gguf):
    """What its converter makes of the folder (conversion/gpt_oss.py of b6715)."""
    _, state = published()
    names, tensors = converter_names(CONFIG), {}
    for name, tensor in state.items():
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        of_gate_up = ((slice(0, None, 2), "gate"), (slice(1, None, 2), "up"))
        sides = of_gate_up if "gate_up_proj" in name else ((slice(None), "down"),)
        if name.endswith("proj_bias"):
            for rows, side in sides:
                tensors[f"{layer}.ffn_{side}_exps.bias"] = tensor[:, rows].contiguous().numpy()
        elif name.endswith("_blocks"):
            # nibbles of neighbours, the first one low, become those of inputs 16 apart
            codes = torch.stack((tensor & 15, tensor >> 4), dim=-1).flatten(3)
            nibbles = codes[..., :16] | (codes[..., 16:] << 4)
            scales = state[name.replace("_blocks", "_scales")][..., None]
            blocks = torch.cat((scales, nibbles), dim=-1).flatten(2)
            for rows, side in sides:
                values = blocks[:, rows].contiguous().numpy()
                kind = gguf.GGMLQuantizationType.MXFP4
                tensors[f"{layer}.ffn_{side}_exps.weight"] = values, kind
        elif not name.endswith("_scales"):
            end = ".weight" if name.endswith("sinks") else ""
            target = names.get_name(name + end, try_suffixes=(".weight", ".bias"))
            tensors[target] = tensor.numpy()
    keys = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": E,
        "feed_forward_length": F,
        "expert_feed_forward_length": F,
        "expert_count": X,
        "expert_used_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 7,
        "rope.freq_base": 1000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    named = {f"gpt-oss.{key}": value for key, value in keys.items()}
    return write_gguf({"general.architecture": "gpt-oss"} | named, tensors)


def loaded(path, ops):
    files = open_model_files(str(path), report=print)
    packing = ops.weight_packing(torch.float32)
    tensors = files.tensors(keeps_blocks=packing is not None)
    return load_model(files.config, tensors, dtype=torch.float32, ops=ops)


def as_bytes(monkeypatch):
    """Products of experts with inputs in bytes."""
    forward, gate = GptOssExperts.forward, GptOssExperts._apply_gate
    monkeypatch.setattr(
        GptOssExperts, "forward", lambda self, x, *routing: forward(self, in_bytes(x), *routing)
    )
    monkeypatch.setattr(GptOssExperts, "_apply_gate", lambda self, x: in_bytes(gate(self, x)))


def assert_differs_by_rounded_activations_only(ours, monkeypatch):
    model, _ = published()
    exact = torch.cat(full_logits(model, sequences(LENGTHS)))
    as_bytes(monkeypatch)
    rounded = torch.cat(full_logits(model, sequences(LENGTHS)))
    by_rounding = (rounded - exact).norm()
    assert 1e-4 * exact.norm() < by_rounding < 0.05 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert (ours - rounded).norm() < 0.2 * by_rounding


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_blocks_stay_on_a_cpu_and_a_file_has_the_bits_of_the_folder(
    folder, write_gguf, ops, paged_logits, monkeypatch
):
    logits = []
    for path in (folder, llama_cpp_file(write_gguf)):
        native = CpuOperations(native_library_or_skip())
        model = loaded(path, native)
        logits.append(torch.cat(paged_logits(model, sequences(LENGTHS), on=native)))
        by_format = native.weight_packing(torch.float32).bytes_by_format()
        assert by_format.keys() == {"MXFP4", "float32"}
        assert by_format["MXFP4"] == 3 * X * 3 * E * F * 17 // 32
    assert torch.equal(*logits)
    assert_differs_by_rounded_activations_only(logits[0], monkeypatch)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_torch_dequantises_them(folder, write_gguf, ops, paged_logits):
    expected = full_logits(published()[0], sequences(LENGTHS))
    for path in (folder, llama_cpp_file(write_gguf)):
        for ours, theirs in zip(
            paged_logits(loaded(path, ops), sequences(LENGTHS)), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_gpu_gives_the_logits_of_transformers(folder, paged_logits):
    types = open_model_files(str(folder), report=print).quantised_types
    on = TritonOperations(torch.device("cpu"), quantised_types=types)
    few = sequences((9, 1))
    expected = full_logits(published()[0], few)
    for ours, theirs in zip(paged_logits(loaded(folder, on), few, on=on), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    by_format = on.weight_packing(torch.float32).bytes_by_format()
    assert by_format["mxfp4"] == 3 * X * 3 * E * F * 18 // 32  # scales are float16


def test_two_ranks_share_experts_and_sinks(folder, monkeypatch):
    with RankProcesses(2) as ranks:
        answers = ranks.run(rank_logits, folder, sequences(LENGTHS), "native", tp_size=2)
    assert_differs_by_rounded_activations_only(torch.cat(answers[0]), monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "lacks .*down_proj_scales"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": torch.zeros(X, E, 2).byte()}),
            r"blocks are torch.uint8 \[4, 64, 3, 16\] and scales torch.uint8 \[4, 64, 2\]",
        ),
    ],
    ids=["no scales", "another shape"],
)
def test_broken_stacks_are_refused(folder, tmp_path, change, message):
    _, tensors = published()
    change(tensors, "model.layers.1.mlp.experts.down_proj")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModelFile, match=message):
        list(open_model_files(str(tmp_path), report=print).tensors())
