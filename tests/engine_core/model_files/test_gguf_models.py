"""A tiny transformers model, written as llama.cpp's converter would, comes back as it was."""

import subprocess
import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile, open_model_files
from engine_core.models.loading import load_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_MINISTRAL["original_max_position_embeddings"] = 16
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 2.5, 3.0, 4.0],
    "attention_factor": 1.125,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_PLAIN_HEADS = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama untied, biases": LlamaConfig(
        **_SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "llama3 rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "linear rope": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "mistral": MistralConfig(**_SHAPE, sliding_window=33),
    "qwen2": Qwen2Config(**_PLAIN_HEADS),
    "qwen2 yarn": Qwen2Config(**_PLAIN_HEADS, rope_parameters=_YARN),
    "qwen3": Qwen3Config(**_SHAPE),
    "gemma3": Gemma3TextConfig(**_SHAPE, query_pre_attn_scalar=16, sliding_window=17),
    "gemma3 linear rope": Gemma3TextConfig(
        **_SHAPE, query_pre_attn_scalar=16, sliding_window=17, rope_parameters=_GEMMA_ROPE
    ),
    "smollm3": SmolLM3Config(**_PLAIN_HEADS),
    "phi3": Phi3Config(**_PLAIN_HEADS, sliding_window=33),
    "phi3 of which a part turns": Phi3Config(
        **_PLAIN_HEADS, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "phi3 longrope": Phi3Config(
        **_PLAIN_HEADS, rope_parameters=_LONG, original_max_position_embeddings=128
    ),
    "olmo2": Olmo2Config(**_PLAIN_HEADS),
    "ministral3": Ministral3Config(**_SHAPE, rope_parameters=_MINISTRAL),
    "granite": GraniteConfig(**_PLAIN_HEADS, **_GRANITE),
    "arcee": ArceeConfig(**_SHAPE, rope_parameters=_YARN),
}
_PAIRED_ROWS = ("llama", "mistral3", "smollm3", "granite", "arcee")
"""Architectures whose q and k the converter permutes."""


def architecture_of(config: PreTrainedConfig) -> str:
    return {"mistral": "llama", "gemma3_text": "gemma3", "ministral3": "mistral3"}.get(
        config.model_type, config.model_type
    )


def converter_names(config: PreTrainedConfig) -> gguf.TensorNameMap:
    arch = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture_of(config)
    )
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_keys(config: PreTrainedConfig) -> dict[str, Any]:
    arch = architecture_of(config)
    head_dim = getattr(config, "head_dim", None) or 8
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if hasattr(config, "head_dim"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch in ("llama", "qwen3"):
        keys["rope.dimension_count"] = head_dim
    if arch == "phi3":
        part = config.rope_parameters["partial_rotary_factor"]
        keys["rope.dimension_count"] = int(head_dim * part)
        keys["rope.scaling.original_context_length"] = 128
        keys["rope.scaling.attn_factor"] = 1.125
    if arch == "mistral3":
        keys |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3}
    if arch == "granite":
        keys |= {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
        }
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
        }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if arch == "gemma3" or (
        config.model_type in ("mistral", "phi3") and config.sliding_window is not None
    ):
        keys["attention.sliding_window"] = config.sliding_window
    return {"general.architecture": arch} | {f"{arch}.{key}": v for key, v in keys.items()}


def gguf_tensors(config: PreTrainedConfig, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    names, arch = converter_names(config), architecture_of(config)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        values = tensor.numpy()
        if arch in _PAIRED_ROWS and "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if arch in _PAIRED_ROWS and "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = values
    if config.rope_parameters.get("rope_type") == "longrope":
        for kind in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
            tensors[f"rope_factors_{kind}.weight"] = factors
    if config.rope_parameters.get("rope_type") == "llama3":
        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        index = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        plain = 1.0 / config.rope_parameters["rope_theta"] ** index
        tensors["rope_freqs.weight"] = (plain / inverse).numpy()
    return tensors


@pytest.mark.parametrize("case", CONFIGS)
def test_weights_and_config_survive_the_conversion(case: str, write_gguf) -> None:
    torch.manual_seed(0)
    config = CONFIGS[case]
    model = AutoModelForCausalLM.from_config(config)
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    files = open_model_files(
        str(write_gguf(gguf_keys(config), gguf_tensors(config, state))), report=print
    )

    tensors = dict(files.tensors())
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6, msg=name)

    again = AutoConfig.for_model(**files.config)
    assert type(again) is type(config)
    fields = {*_SHAPE, "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias"}
    fields |= {*_GRANITE, "no_rope_layers"}
    fields |= {"sliding_window", "layer_types", "query_pre_attn_scalar", "hidden_act"}
    fields -= {"bos_token_id", "eos_token_id", "pad_token_id"}
    for field in sorted(fields):
        ours, theirs = getattr(again, field, None), getattr(config, field, None)
        if field == "head_dim" and theirs is None:
            theirs = 8
        if field == "rope_parameters" and config.rope_parameters.get("rope_type") == "yarn":
            # the two betas are written out, with transformers' defaults
            theirs = theirs | {"beta_fast": 32.0, "beta_slow": 1.0}
        assert ours == theirs, field


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_of_the_file_are_those_of_transformers(
    case: str, write_gguf, ops, paged_logits
) -> None:
    torch.manual_seed(0)
    config = CONFIGS[case]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    path = write_gguf(gguf_keys(config), gguf_tensors(config, state))
    files = open_model_files(str(path), report=print)
    ours = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    sequences = [torch.randint(99, (length,)).tolist() for length in (45, 1, 19, 33)]
    for tokens, logits in zip(sequences, paged_logits(ours, sequences), strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens])).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


def test_absent_output_bias_of_a_model_with_attention_biases_is_zero(write_gguf) -> None:
    config = LlamaConfig(**_SHAPE, attention_bias=True)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    tensors = gguf_tensors(config, {k: v for k, v in state.items() if "o_proj.bias" not in k})
    files = open_model_files(str(write_gguf(gguf_keys(config), tensors)), report=print)
    assert {k for k, _ in files.tensors() if k.endswith("o_proj.bias")} == {
        f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(7)
    }


def test_parts_of_a_split_file_are_read_as_one(write_gguf, tiny_llama_keys) -> None:
    one, two = np.ones((8, 32), np.float32), np.full(32, 2, np.float32)
    write_gguf(tiny_llama_keys, {"token_embd.weight": one}, name="m-00001-of-00002.gguf")
    second = write_gguf(
        {"general.architecture": "llama"},
        {"output_norm.weight": two},
        name="m-00002-of-00002.gguf",
    )
    files = open_model_files(str(second), report=print)
    assert (files.name, files.path.name) == ("m", "m-00001-of-00002.gguf")
    assert {name for name, _ in files.tensors()} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    files.path.unlink()
    with pytest.raises(BrokenModelFile, match=r"1 of the 2 parts.*m-00001-of-00002\.gguf"):
        open_model_files(str(second), report=print)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'.*gemma3, .*llama, .*qwen3moe"),
        ({"llama.attention.head_count": [2, 1]}, "differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
        ({"llama.attention.value_length": 8}, "different lengths"),
    ],
)
def test_what_would_change_the_result_and_is_not_read_is_refused(
    keys, message, write_gguf, tiny_llama_keys
) -> None:
    embedding = np.ones((8, 32), np.float32)
    path = write_gguf(tiny_llama_keys | keys, {"token_embd.weight": embedding})
    with pytest.raises(UnsupportedModelFile, match=message):
        open_model_files(str(path), report=print)


@pytest.mark.parametrize(
    ("name", "message"),
    [("blk.0.ffn_gate_exps.weight", "ffn_gate_exps"), ("rope_freqs.weight", "not Llama 3's")],
)
def test_tensors_that_have_no_place_are_refused(name, message, write_gguf, tiny_llama_keys) -> None:
    embedding = np.ones((8, 32), np.float32)
    tensors = {"token_embd.weight": embedding, name: np.arange(1, 9, dtype=np.float32)}
    path = write_gguf(tiny_llama_keys, tensors)
    with pytest.raises(UnsupportedModelFile, match=message):
        open_model_files(str(path), report=print)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": "many"}, "wrong type or value"),
        ({"llama.attention.head_count": 0}, "wrong type or value|do not divide"),
        ({"llama.embedding_length": 64}, "64, the embedding has 32 columns"),
    ],
)
def test_contradictory_metadata_is_named(keys, message, write_gguf, tiny_llama_keys) -> None:
    embedding = np.ones((8, 32), np.float32)
    path = write_gguf(tiny_llama_keys | keys, {"token_embd.weight": embedding})
    with pytest.raises(BrokenModelFile, match=message):
        open_model_files(str(path), report=print)


def test_missing_keys_are_named(write_gguf, tiny_llama_keys) -> None:
    del tiny_llama_keys["llama.feed_forward_length"]
    path = write_gguf(tiny_llama_keys, {"token_embd.weight": np.ones((8, 32), np.float32)})
    with pytest.raises(BrokenModelFile, match=r"lacks llama\.feed_forward_length"):
        open_model_files(str(path), report=print)


def test_a_file_is_opened_without_torch(write_gguf, tiny_llama_keys) -> None:
    """The daemon opens its files while torch is still being loaded."""
    path = write_gguf(tiny_llama_keys, {"token_embd.weight": np.ones((8, 32), np.float32)})
    code = (
        "import sys; from engine_core.model_files import open_model_files;"
        f"open_model_files({str(path)!r}, report=print).tokenizer();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fingerprint_is_of_the_content(write_gguf, tiny_llama_keys) -> None:
    embedding = np.ones((8, 32), np.float32)
    tensors = {"token_embd.weight": embedding}
    one = open_model_files(str(write_gguf(tiny_llama_keys, tensors, name="a.gguf")), report=print)
    same = open_model_files(str(write_gguf(tiny_llama_keys, tensors, name="b.gguf")), report=print)
    embedding[3, 3] = 2
    other = open_model_files(str(write_gguf(tiny_llama_keys, tensors, name="c.gguf")), report=print)
    assert one.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("stored", "dtype"), [(np.float16, "bfloat16"), (np.float32, "float32"), (None, None)]
)
def test_the_dtype_is_that_of_most_bytes(stored, dtype, write_gguf, tiny_llama_keys) -> None:
    """What `--dtype auto` goes by; of a quantised file there is none."""
    embedding = np.ones((8, 32), np.float32)
    blocks = gguf.quants.quantize(embedding, gguf.GGMLQuantizationType.Q8_0)
    tensors = {
        "token_embd.weight": (blocks, gguf.GGMLQuantizationType.Q8_0)
        if stored is None
        else embedding.astype(stored),
        "blk.0.attn_norm.weight": np.ones(32, np.float32),
    }
    files = open_model_files(str(write_gguf(tiny_llama_keys, tensors)), report=print)
    assert files.config["dtype"] == dtype
