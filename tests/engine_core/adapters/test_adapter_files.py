"""Adapters as files: what is read of PEFT's folders and GGUF, and what is refused by name."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine_core.adapters.adapter import AdapterTarget, AdapterTargets, read_adapter
from engine_core.adapters.errors import AdapterError
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys

Q, GATE, DOWN = (
    f"model.layers.0.{each}" for each in ("self_attn.q_proj", "mlp.gate", "mlp.down_proj")
)
K = "model.layers.1.self_attn.k_proj"
TARGETS = AdapterTargets(
    {
        Q: AdapterTarget(0, 0, 6, 8),
        GATE: AdapterTarget(1, 0, 6, 4),
        DOWN: AdapterTarget(2, 0, 5, 6),
        K: AdapterTarget(3, 0, 6, 8),
    },
    ModelSpec(
        layers=(PagedKeys(1, 4, 4), PagedKeys(2, 4, 4)),
        num_query_heads=2,
        hidden_size=6,
        vocab_size=9,
        max_model_len=9,
    ),
    has_experts=False,
    products_of=lambda name, tensor: [(name, tensor)],
)
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}


def weights(name=Q, outputs=8, inputs=6, rank=2, prefix="base_model.model."):
    generator = torch.Generator().manual_seed(rank)
    return {
        f"{prefix}{name}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{prefix}{name}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def folder(path, tensors=None, **config):
    path.mkdir(exist_ok=True)
    save_file(weights() if tensors is None else tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return path


def read(path, max_rank=None, targets=TARGETS):
    return read_adapter(path, targets, max_rank=max_rank)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"alpha_pattern": {"k_proj": 1}}, 3.0),
        ({"r": 9, "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}}, 3.0),
        ({"lora_alpha": 1.5}, 0.75),
    ],
)
def test_the_scale_is_alpha_by_rank_as_pefts_patterns_say(tmp_path, config, scale):
    adapter = read(folder(tmp_path / "a", **config))
    part = adapter.parts[0][0]
    a, b = weights().values()
    assert adapter.rank == 2
    assert torch.equal(part.a_RE, a)
    torch.testing.assert_close(part.b_NR, b * scale)


@pytest.mark.parametrize("prefix", ["base_model.model.model.language_", "language_model.", ""])
def test_names_of_multimodal_models_and_half_precision_are_read(tmp_path, prefix):
    tensors = {name: tensor.bfloat16() for name, tensor in weights(prefix=prefix).items()}
    part = read(folder(tmp_path / "a", tensors)).parts[0][0]
    assert part.a_RE.dtype is torch.float32 and part.b_NR.shape == (8, 2)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only LORA"),
        ({"use_dora": True}, "DoRA is not applied"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base model"),
        ({"init_lora_weights": "olora"}, "'olora', which changes the base model"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts"]}, "target_parameters is"),
        ({"a_field_of_tomorrow": 7}, "a_field_of_tomorrow is '7', which is not applied"),
        ({"r": 0}, "r is 0, it must be a whole number from 1 to 256"),
        ({"r": 300}, "r is 300"),
        ({"r": 3}, r"lora_A of .*q_proj is \[2, 6\], its rank by adapter_config.json is 3"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"rank_pattern": {"q": "x"}}, "rank_pattern is"),
        ({"alpha_pattern": {"(": 2}}, "is no regular expression"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "could take for ever to match"),
        ({"rank_pattern": {".*.*.*.*x": 2}}, "could take for ever to match"),
    ],
)
def test_what_is_not_applied_is_refused_by_name(tmp_path, config, why):
    with pytest.raises(AdapterError, match=why):
        read(folder(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "holds no weights"),
        (weights(outputs=7), r"A is \[2, 6\] and B is \[7, 2\] .* 6 inputs and 8 outputs"),
        (weights(inputs=5), "use an adapter that was made for this model"),
        (weights("model.layers.3.self_attn.q_proj"), "the model has no such layer"),
        (weights("lm_head"), "embeddings and the output layer take no adapters"),
        (weights() | {"base_model.model.x.lora_magnitude_vector": torch.ones(2)}, "no DoRA"),
        ({k: v for k, v in weights().items() if "_A" in k}, "only lora_A of"),
        ({k: v * float("nan") for k, v in weights().items()}, "are not finite"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(tmp_path, tensors, why):
    with pytest.raises(AdapterError, match=why):
        read(folder(tmp_path / "a", tensors))


def test_experts_and_ranks_beyond_the_limit_are_refused(tmp_path):
    expert = "model.layers.0.mlp.experts.1.up_proj"
    of_experts = dataclasses.replace(TARGETS, has_experts=True)
    with pytest.raises(AdapterError, match="experts take no adapters"):
        read(folder(tmp_path / "a", weights(expert)), targets=of_experts)
    with pytest.raises(AdapterError, match=r"rank 2 .* the limit is 1; .*--max-lora-rank"):
        read(folder(tmp_path / "b"), max_rank=1)


def test_files_that_are_not_there_or_broken_are_named(tmp_path):
    with pytest.raises(AdapterError, match="there is no adapter at"):
        read(tmp_path / "none")
    broken = folder(tmp_path / "a")
    (broken / "adapter_model.safetensors").rename(broken / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"but adapter_model\.bin; .*safe_serialization"):
        read(broken)
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        read(broken)
    (broken / "adapter_config.json").write_text("[")
    with pytest.raises(AdapterError, match="not valid JSON"):
        read(broken)


def test_any_change_of_the_files_changes_the_fingerprint(tmp_path):
    first = read(folder(tmp_path / "a")).fingerprint
    assert read(folder(tmp_path / "same")).fingerprint == first
    others = {read(folder(tmp_path / "b", lora_alpha=7)).fingerprint}
    tensors = weights()
    next(iter(tensors.values()))[0, 0] += 1e-3
    others.add(read(folder(tmp_path / "c", tensors)).fingerprint)
    assert len(others | {first}) == 3


def gguf_file(path, *, architecture="llama", kind=("adapter", "lora"), alpha=6.0, more=()):
    """As convert_lora_to_gguf.py writes it: llama's q and k have their rotary pairs apart."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", kind[0])
    writer.add_string("adapter.type", kind[1])
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    a, b = weights().values()
    permuted = b.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(8, 2)  # LlamaModel.permute
    writer.add_tensor("blk.0.attn_q.weight.lora_a", a.numpy())
    if architecture == "llama":
        b = permuted
    writer.add_tensor("blk.0.attn_q.weight.lora_b", b.contiguous().numpy())
    writer.add_tensor("blk.1.attn_k.weight.lora_a", a.numpy())
    writer.add_tensor("blk.1.attn_k.weight.lora_b", b.contiguous().numpy())
    a, b = weights(DOWN, 6, 5, rank=1).values()
    writer.add_tensor("blk.0.ffn_down.weight.lora_a", a.numpy().astype(np.float16))
    writer.add_tensor("blk.0.ffn_down.weight.lora_b", b.numpy())
    for name in more:
        writer.add_tensor(name, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_gguf_adapter_is_read_as_llama_cpp_means_it(tmp_path, architecture):
    adapter = read(gguf_file(tmp_path / "a.gguf", architecture=architecture))
    a, b = weights().values()
    part, down, keys = adapter.parts[0][0], adapter.parts[2][0], adapter.parts[3][0]
    assert torch.equal(part.a_RE, a)
    torch.testing.assert_close(part.b_NR, b * 3)
    torch.testing.assert_close(keys.b_NR, b * 3)  # by the two heads of its own layer
    a, b = weights(DOWN, 6, 5, rank=1).values()
    torch.testing.assert_close(down.a_RE, a, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(down.b_NR, b * 6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": ("model", "lora")}, "is of type 'model'"),
        ({"kind": ("adapter", "control_vector")}, "not a LoRA adapter"),
        ({"architecture": "mamba"}, "architecture 'mamba', known are"),
        ({"alpha": None}, "adapter.lora.alpha None"),
        ({"more": ["token_embd.weight.lora_a"]}, "only lora_A of|only lora_a of"),
        ({"more": ["blk.0.attn_q.bias.lora_a"]}, "which is not applied"),
        ({"more": ["blk.0.ssm.weight.lora_a"]}, "which is not applied"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path, options, why):
    with pytest.raises(AdapterError, match=why):
        read(gguf_file(tmp_path / "a.gguf", **options))
