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
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile, open_model_files
from engine_core.models.loading import load_model
from kernels.interface.weights import QuantisedTensor
from tests.engine_core.model_files.converted import gguf_keys, gguf_tensors

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
_THETA = {"rope_type": "default", "rope_theta": 50000.0}
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


def gemma4(**options: Any) -> Gemma4TextConfig:
    shape = {**_SHAPE, "num_hidden_layers": 4, "global_head_dim": 24, "sliding_window": 17}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **{**shape, "layer_types": kinds, "hidden_size_per_layer_input": 0, **options}
    )
    config.allow_global_per_layer_attribute_access = True
    return config


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
    "gemma2": Gemma2Config(
        **_SHAPE, query_pre_attn_scalar=16, sliding_window=17, attn_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**_SHAPE, query_pre_attn_scalar=16, sliding_window=17),
    "gemma3 linear rope": Gemma3TextConfig(
        **_SHAPE, query_pre_attn_scalar=16, sliding_window=17, rope_parameters=_GEMMA_ROPE
    ),
    "gemma4 keys are values": gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4 embeddings per layer": gemma4(
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=99,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    "gemma3n": Gemma3nTextConfig(
        **{**_SHAPE, "num_hidden_layers": 4, "intermediate_size": [80, 80, 96, 80]},
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.95, 0.0, 0.7, 0.0],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=99,
        laurel_rank=8,
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
    "olmo3": Olmo3Config(
        **_PLAIN_HEADS,
        sliding_window=17,
        rope_parameters={
            "full_attention": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "starcoder2": Starcoder2Config(**_PLAIN_HEADS, tie_word_embeddings=False),
    "starcoder2 no biases": Starcoder2Config(**_PLAIN_HEADS, use_bias=False),
    "cohere2": Cohere2Config(
        **_PLAIN_HEADS, sliding_window=17, logit_scale=2.0, rope_parameters=_THETA
    ),
    "exaone4": Exaone4Config(**_SHAPE, sliding_window=17),
    "exaone4 no window": Exaone4Config(
        **_SHAPE, sliding_window=None, layer_types=["full_attention"] * 7
    ),
    "seed_oss": SeedOssConfig(**_SHAPE),
    "ernie4_5": Ernie4_5Config(**_SHAPE),
    "glm4": Glm4Config(**_SHAPE),
    "glm": GlmConfig(**_SHAPE, attention_bias=False),
    "hunyuan": HunYuanDenseV1Config(**_SHAPE),
    "nemotron": NemotronConfig(**_SHAPE),
    "nemotron biases": NemotronConfig(**_PLAIN_HEADS, attention_bias=True, mlp_bias=True),
    "ministral3": Ministral3Config(**_SHAPE, rope_parameters=_MINISTRAL),
    "granite": GraniteConfig(**_PLAIN_HEADS, **_GRANITE),
    "arcee": ArceeConfig(**_SHAPE, rope_parameters=_YARN),
}


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
        if isinstance(tensor, QuantisedTensor):  # of a table that stays in the file
            tensor = tensor.dequantise()
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6, msg=name)

    again = AutoConfig.for_model(**files.config)
    assert type(again) is type(config)
    again.allow_global_per_layer_attribute_access = True
    if case.startswith("gemma4"):
        layers = [
            [(each.head_dim, each.num_key_value_heads) for each in one.per_layer_config]
            for one in (again, config)
        ]
        assert layers[0] == layers[1]
    fields = {*_SHAPE, "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias"}
    fields |= {*_GRANITE, "no_rope_layers"}
    fields |= {"activation_sparsity_pattern", "altup_num_inputs", "laurel_rank"}
    fields |= {"num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input"}
    fields |= {"attn_logit_softcapping", "final_logit_softcapping"}
    fields |= {"logit_scale", "layer_norm_eps", "norm_epsilon", "norm_eps", "use_bias"}
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


WITH_EXPERTS = {
    "gemma4 with experts": gemma4(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32
    )
}


@pytest.mark.parametrize("case", [*CONFIGS, *WITH_EXPERTS])
def test_logits_of_the_file_are_those_of_transformers(
    case: str, write_gguf, ops, paged_logits
) -> None:
    torch.manual_seed(0)
    config = (CONFIGS | WITH_EXPERTS)[case]
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


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_q_k_and_v_in_one_tensor_are_taken_apart_in_their_blocks(write_gguf, ops, paged_logits):
    """As files of the first GLM-4 have them."""
    torch.manual_seed(0)
    config = GlmConfig(**_SHAPE | {"hidden_size": 64, "num_hidden_layers": 2})
    state = AutoModelForCausalLM.from_config(config).state_dict()
    tensors = gguf_tensors(config, {key: torch.randn_like(each) for key, each in state.items()})
    block = gguf.GGMLQuantizationType.Q8_0
    logits = []
    for is_fused in (False, True):
        for layer in range(2 * is_fused):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
        blocks = {
            name: (gguf.quants.quantize(each, block), block)
            for name, each in tensors.items()
            if name.endswith(("attn_q.weight", "_k.weight", "_v.weight", "_qkv.weight"))
        }
        path = write_gguf(gguf_keys(config), tensors | blocks)
        files = open_model_files(str(path), report=print)
        given = files.tensors(keeps_blocks=True)
        model = load_model(files.config, given, dtype=torch.float32, ops=ops)
        logits += paged_logits(model, [[5, 9, 7, 30, 44, 61, 3]])
    assert torch.equal(*logits)


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
