"""Models without code of ours, through transformers' own, over a paged cache."""

import pytest
import torch
import transformers

from engine_core.models.errors import ModelError, UnsupportedArchitecture
from engine_core.models.transformers_check import largest_difference
from engine_core.models.transformers_model import load_transformers_model
from kernels.backends import select_operations

SMALL = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CASES = {
    "opt": lambda: transformers.OPTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=24, max_position_embeddings=64, **SMALL
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, n_positions=64, **SMALL
    ),
    "phi": lambda: transformers.PhiConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **SMALL
    ),
    "phi3": lambda: transformers.Phi3Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
        original_max_position_embeddings=64, **SMALL
    ),
    "falcon": lambda: transformers.FalconConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, **SMALL
    ),
    "falcon-alibi": lambda: transformers.FalconConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, parallel_attn=False, bias=True, **SMALL
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **SMALL
    ),
    "gpt-j": lambda: transformers.GPTJConfig(
        n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, **SMALL
    ),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        hidden_size=48, num_layers=2, num_heads=4, intermediate_size=64, window_size=5,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, **SMALL
    ),
    "bloom": lambda: transformers.BloomConfig(hidden_size=48, n_layer=2, n_head=4, **SMALL),
    "mpt": lambda: transformers.MptConfig(
        d_model=48, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2, vocab_size=131
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=6, max_position_embeddings=64,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0, **SMALL
    ),
    "cohere": lambda: transformers.CohereConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        logit_scale=0.3, max_position_embeddings=64, **SMALL
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, max_position_embeddings=64, **SMALL
    ),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        n_embd=48, n_layer=2, n_head=4, n_positions=64, **SMALL
    ),
    "olmo2": lambda: transformers.Olmo2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **SMALL
    ),
    "stablelm": lambda: transformers.StableLmConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, **SMALL
    ),
}  # fmt: skip

ALL_AT_ONCE = {
    "opt",
    "gpt2",
    "phi",
    "phi3",
    "gpt-neox",
    "gemma2",
    "cohere",
    "starcoder2",
    "olmo2",
    "gpt-bigcode",
}


def save_random(config, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_plain_model(name, tmp_path, caplog):
    caplog.set_level("INFO")
    config = CASES[name]()
    reference = save_random(config, tmp_path)
    ops = select_operations(torch.device("cpu"))
    model = load_transformers_model(tmp_path, config.to_dict(), dtype=torch.float32, ops=ops)
    token_ids_T = torch.randint(3, 131, (23,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_TV = reference(input_ids=token_ids_T[None]).logits[0]
        assert expected_TV.std() > 0.01
        assert (
            largest_difference(model, token_ids_T, expected_TV, ops=ops, dtype=torch.float32) < 1e-4
        )
    assert ("with paged attention" in caplog.text) == (name in ALL_AT_ONCE)


@pytest.mark.parametrize(
    "config",
    [
        transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50),
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_what_is_no_decoder_with_a_kv_cache_is_refused_by_name(config, tmp_path):
    config.save_pretrained(tmp_path)
    if config.model_type == "mamba":
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = config.to_dict()
    with pytest.raises((UnsupportedArchitecture, ModelError)) as caught:
        load_transformers_model(
            tmp_path, raw, dtype=torch.float32, ops=select_operations(torch.device("cpu"))
        )
    assert config.model_type in str(caught.value).lower() or str(tmp_path) in str(caught.value)
