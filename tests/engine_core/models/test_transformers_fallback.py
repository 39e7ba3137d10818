"""Models without code of ours, through transformers' own, against their plain full forward."""

import dataclasses
import json

import pytest
import torch
import transformers

from engine_core.models.errors import ModelError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.layer_cache import PagedKeys, paged_keys
from engine_core.models.transformers import attention
from engine_core.models.transformers.attention import FlattenedModel, PerRequestModel
from engine_core.models.transformers.experts import take_experts
from engine_core.models.transformers.model import load_transformers_model

IDS = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    **IDS,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
OLD_SHAPE = {**IDS, "n_embd": 36, "n_layer": 3, "n_head": 6, "n_positions": 128}
OLD_SHAPE["initializer_range"] = 0.3
FALCON = {**SHAPE, "num_attention_heads": 6}
FALCON.pop("intermediate_size")

FLATTENED = {
    "opt": lambda: transformers.OPTConfig(
        **IDS, hidden_size=36, ffn_dim=50, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=128, word_embed_proj_dim=20, do_layer_norm_before=False,
        init_std=0.3,
    ),
    "gpt2": lambda: transformers.GPT2Config(**OLD_SHAPE, scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**OLD_SHAPE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "phi": lambda: transformers.PhiConfig(
        **{**GROUPED, "hidden_size": 48}, partial_rotary_factor=0.5
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=3, query_pre_attn_scalar=11,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "cohere": lambda: transformers.CohereConfig(**GROUPED, logit_scale=0.25, use_qk_norm=True),
    "starcoder2": lambda: transformers.Starcoder2Config(**GROUPED, sliding_window=5),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "granite": lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=3.0),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "apertus": lambda: transformers.ApertusConfig(**GROUPED),
    "laguna": lambda: transformers.LagunaConfig(
        **GROUPED, head_dim=8, sliding_window=5, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=16,
    ),
    "gemma4_text (heads of two sizes)": lambda: transformers.Gemma4TextConfig(
        **GROUPED, head_dim=8, global_head_dim=12, sliding_window=3, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}  # fmt: skip

PER_REQUEST = {
    "falcon": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon-alibi": lambda: transformers.FalconConfig(
        **FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon-multi-query": lambda: transformers.FalconConfig(**FALCON, multi_query=True),
    "bloom": lambda: transformers.BloomConfig(
        **IDS, hidden_size=36, n_layer=3, n_head=6, initializer_range=0.3
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=131, d_model=32, n_heads=4, n_layers=3, max_seq_len=128, initializer_range=0.3
    ),
    "gptj": lambda: transformers.GPTJConfig(**OLD_SHAPE, rotary_dim=4),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        **IDS, hidden_size=36, num_layers=4, num_heads=6, window_size=3, initializer_range=0.3,
        attention_types=[[["global", "local"], 2]], max_position_embeddings=128,
    ),
    "stablelm": lambda: transformers.StableLmConfig(
        **{**GROUPED, "hidden_size": 48}, qk_layernorm=True
    ),
    "gpt_oss (sinks)": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=4, sliding_window=4, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention"
        ],
    ),
    "diffllama (two attentions a layer)": lambda: transformers.DiffLlamaConfig(
        **{**GROUPED, "hidden_size": 48, "num_attention_heads": 4}
    ),
    "deepseek_v3 (keys wider than values)": lambda: transformers.DeepseekV3Config(
        **SHAPE, num_key_value_heads=6, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, moe_intermediate_size=16,
    ),
    "mimo_v2_flash (keys wider than values, windows with sinks)": lambda: (
        transformers.MiMoV2FlashConfig(
            **{**GROUPED, "num_attention_heads": 4}, head_dim=12, v_head_dim=8, sliding_window=5,
            moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        )
    ),
    "longcat_flash (two attentions a layer)": lambda: transformers.LongcatFlashConfig(
        **IDS, hidden_size=36, num_layers=2, num_attention_heads=6, max_position_embeddings=128,
        initializer_range=0.3, ffn_hidden_size=50, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=4, qk_rope_head_dim=4, head_dim=4, v_head_dim=6, moe_topk=2,
        n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=16,
    ),
}  # fmt: skip

EITHER = {"gptj"}
"""Flattened since transformers 5.24."""

REFUSED = {
    "t5": lambda: transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
    "mamba": lambda: transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1),
    "jamba": lambda: transformers.JambaConfig(**GROUPED, attn_layer_period=2, attn_layer_offset=1),
    "bert": lambda: transformers.BertConfig(**SHAPE),
    "llama4": lambda: transformers.Llama4TextConfig(
        **GROUPED, head_dim=8, num_local_experts=2, intermediate_size_mlp=32
    ),
    "resnet": lambda: transformers.ResNetConfig(),
}

MIXTURES = {
    "mixtral": FLATTENED["mixtral"],
    "hunyuan_v1_moe": lambda: transformers.HunYuanMoEV1Config(
        **GROUPED, head_dim=6, num_experts=4, moe_topk=2
    ),
    "flex_olmo": lambda: transformers.FlexOlmoConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2
    ),
}
FLATTENED |= {name: MIXTURES[name] for name in ("hunyuan_v1_moe", "flex_olmo")}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small lose more than they win by a second thread, most of all on a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(config, folder):
    """A random model in a folder -> (the model, its config.json)."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if "experts" in str(model).lower() and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    return model, json.loads((folder / "config.json").read_text())


def random_sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (23, 1, 17, 30)]


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", [*FLATTENED, *PER_REQUEST])
def test_paged_logits_equal_those_of_the_plain_model(name, tmp_path, ops, paged_logits):
    plain, config = save((FLATTENED | PER_REQUEST)[name](), tmp_path)
    model = load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)
    if name not in EITHER:
        assert isinstance(model, FlattenedModel if name in FLATTENED else PerRequestModel)
    sequences = random_sequences()
    for tokens, logits in zip(sequences, paged_logits(model, sequences), strict=True):
        expected = plain_logits(plain, tokens)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_run_in_our_own_code_and_a_row_has_the_same_bits_alone(name, tmp_path, ops):
    model, _ = save(MIXTURES[name](), tmp_path)
    modules = [each for each in model.modules() if type(each).__name__.endswith("Experts")]
    x, weights = torch.randn(40, 36), torch.rand(40, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    expected = [module(x, ids, weights) for module in modules]
    assert take_experts(model, ops) == len(modules) == 3
    for module, theirs in zip(modules, expected, strict=True):
        assert not list(module.parameters()), "they are in memory twice"
        whole = module(x, ids, weights)
        torch.testing.assert_close(whole, theirs, atol=1e-4, rtol=1e-4)
        for rows in (slice(0, 1), slice(7, 30)) if "torch" not in ops.name else ():
            assert torch.equal(module(x[rows], ids[rows], weights[rows]), whole[rows])


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(name, dtype, tmp_path, ops, paged_logits):
    plain, config = save((FLATTENED | PER_REQUEST)[name](), tmp_path)
    model = load_transformers_model(tmp_path, config, dtype=dtype, ops=ops)
    (logits,) = paged_logits(model, [random_sequences()[0]], dtype=dtype)
    expected = plain_logits(plain, random_sequences()[0])
    assert (logits - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_decoder_with_attention_in_every_layer_is_refused_by_name(name, tmp_path, ops):
    config = REFUSED[name]()
    try:
        _, saved = save(config, tmp_path)
    except ValueError:  # no causal language model: the config alone is enough
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
    missing = "Mamba-1, which is missing" if name == "jamba" else ""
    with pytest.raises(UnsupportedArchitecture, match=f"(?i){name}.*{missing}.*supported"):
        load_transformers_model(tmp_path, saved, dtype=torch.float32, ops=ops)


def test_an_unknown_model_type_is_refused_by_name(tmp_path, ops):
    config = {"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match="NobodysForCausalLM"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_attention_to_what_an_indexer_chooses_is_refused_by_name(tmp_path, ops):
    """DeepSeek V3.2, GLM-5."""
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048}
    with pytest.raises(UnsupportedArchitecture, match=r"GlmMoeDsa.* an indexer chooses"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_quantised_weights_are_refused_by_method(tmp_path, ops):
    _, config = save(FLATTENED["gpt2"](), tmp_path)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedArchitecture, match="gptq"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_missing_tensors_are_named_and_not_made_up(tmp_path, ops):
    plain, config = save(FLATTENED["gpt2"](), tmp_path)
    state = {name: t for name, t in plain.state_dict().items() if "h.1.mlp" not in name}
    plain.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelWeightsError, match=r"h\.1\.mlp"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_an_encoder_whose_type_has_a_decoder_is_refused_by_name(tmp_path, ops):
    transformers.ErnieModel(transformers.ErnieConfig(**SHAPE)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedArchitecture, match=r"ErnieModel is not supported: .*another"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path, ops):
    config = FLATTENED["gpt2"]()
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_transformers_model(tmp_path, config.to_dict(), dtype=torch.float32, ops=ops)


def test_attention_that_gives_other_logits_is_not_used(tmp_path, ops, monkeypatch):
    """The check at load time: an attention that we misread falls back, and is never served."""
    _, config = save(FLATTENED["gpt2"](), tmp_path)
    honest = attention._read_call

    def doubled(*arguments):
        call = honest(*arguments)
        return dataclasses.replace(call, scale=2 * call.scale)

    monkeypatch.setattr(attention, "_read_call", doubled)
    model = load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)
    assert isinstance(model, PerRequestModel)


def test_a_model_that_is_wrong_over_a_paged_cache_either_way_is_refused(tmp_path, ops, monkeypatch):
    _, config = save(PER_REQUEST["bloom"](), tmp_path)
    honest = attention._slots_of_sequence
    monkeypatch.setattr(attention, "_slots_of_sequence", lambda *args: honest(*args).flip(0))
    with pytest.raises(UnsupportedArchitecture, match="BloomForCausalLM gives other logits"):
        load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)


def test_longrope_ends_where_its_angles_would_change(tmp_path, ops):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 3,
        "long_factor": [4.0] * 3,
    }
    config = transformers.Phi3Config(
        **GROUPED, rope_parameters=rope, original_max_position_embeddings=32
    )
    _, saved = save(config, tmp_path)
    model = load_transformers_model(tmp_path, saved, dtype=torch.float32, ops=ops)
    assert model.spec.max_model_len == 32


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma2", paged_keys(2, 8, (3, None, 3))),
        ("gemma4_text (heads of two sizes)", (*paged_keys(2, 8, (3, 3)), PagedKeys(2, 12, 12))),
    ],
)
def test_what_layers_keep_is_as_the_config_says(name, layers, tmp_path, ops):
    _, config = save(FLATTENED[name](), tmp_path)
    spec = load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops).spec
    assert (spec.num_query_heads, spec.layers) == (6, layers)
    assert (spec.vocab_size, spec.max_model_len) == (131, 128)
