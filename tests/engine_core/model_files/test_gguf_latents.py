"""Tiny models with latent attention, written as llama.cpp's converter would, give the logits of
transformers."""

import gguf
import pytest
import torch

from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model, load_mtp_head
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    random_model,
    sequences,
)
from tests.engine_core.models.head_context import context_for
from tests.engine_core.models.latent_cases import (
    LATENT_YARN,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
    minicpm3,
    mistral4,
)
from tests.mtp_heads import PublishedMTP

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [3.0, 4.0, 5.0],
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "minicpm3": minicpm3(
        hidden_size=48, v_head_dim=8, dim_model_base=256, rope_parameters=LONG_ROPE
    ),
    "deepseek2, V2, whole queries": deepseek_v2(q_lora_rank=None),
    "deepseek2, V2, YaRN": deepseek_v2(
        rope_parameters=LATENT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "deepseek2, V3, YaRN": deepseek_v3(
        rope_parameters=LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "deepseek2, GLM": glm4_moe_lite(),
    "deepseek2, V2, heads not apart": deepseek_v2(),
    "mistral4": mistral4(),
    "deepseek32, YaRN": deepseek_v32(
        rope_parameters=LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "glm-dsa": glm_moe_dsa(indexer_types=["full", "shared", "full"]),
    "glm-dsa, kinds of layers by their tensors": glm_moe_dsa(
        indexer_types=["full", "full", "shared"]
    ),
}


def keys_of(config, name):
    """What the converter's `set_gguf_parameters` writes."""
    heads = config.qk_nope_head_dim + config.qk_rope_head_dim
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": 128,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": heads,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.model_type == "minicpm3":
        return keys
    keys |= {
        "attention.value_length": config.v_head_dim,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "leading_dense_block_count": 1,
    }
    if "apart" not in name:
        keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": heads,
            "attention.value_length_mla": config.v_head_dim,
        }
    if config.model_type != "deepseek_v2":
        keys["expert_weights_norm"] = config.norm_topk_prob
        keys |= {"expert_group_count": config.n_group}
        keys |= {"expert_group_used_count": config.topk_group}
    if (top_k := getattr(config, "index_topk", None)) is not None:
        keys |= {
            "attention.indexer.head_count": config.index_n_heads,
            "attention.indexer.key_length": config.index_head_dim,
            "attention.indexer.top_k": top_k,
        }
        if (kinds := getattr(config, "indexer_types", None)) and "by" not in name:
            keys["attention.indexer.types"] = [kind == "full" for kind in kinds]
    rope = config.rope_parameters
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    if beta := rope.get("llama_4_scaling_beta"):
        keys["attention.temperature_scale"] = beta
    return keys


def tensors_of(config, state, name):
    """What the converter's `modify_tensors` writes, by the names of the `gguf` package."""
    arch, is_apart = name.partition(",")[0], "not apart" not in name
    known = "glm-dsa" if arch == "deepseek32" else arch  # whose tensors have equal names
    number = next(key for key, own in gguf.MODEL_ARCH_NAMES.items() if own == known)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers + 1)
    tensors = {}
    for name, tensor in state.items():
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                tensors[f"{layer}.ffn_{part}_exps.weight"] = half.contiguous().numpy()
            continue
        if name.endswith("experts.down_proj"):
            tensors[f"{layer}.ffn_down_exps.weight"] = tensor.numpy()
            continue
        if name.endswith("kv_b_proj.weight") and arch != "minicpm3" and is_apart:
            heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            k_b, v_b = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            tensors[f"{layer}.attn_k_b.weight"] = k_b.transpose(1, 2).contiguous().numpy()
            tensors[f"{layer}.attn_v_b.weight"] = v_b.contiguous().numpy()
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = tensor.numpy()
    for kind in ("short", "long"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            tensors[f"rope_factors_{kind}.weight"] = torch.tensor(factors).numpy()
    return tensors


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(name, paged_logits, ops, write_gguf):
    config, arch = CONFIGS[name], name.partition(",")[0]
    reference = random_model(config)
    keys = {f"{arch}.{key}": value for key, value in keys_of(config, name).items()}
    tensors = tensors_of(config, reference.state_dict(), name)
    file = write_gguf({"general.architecture": arch, **keys}, tensors)
    files = open_model_files(str(file), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))


@torch.inference_mode()
@pytest.mark.parametrize("ops", ["cpu"], indirect=True)
def test_products_of_a_head_keep_their_blocks(paged_logits, ops, write_gguf):
    """Three dimensions are matrices below each other; they run as other blocks do."""
    name, kind = "deepseek2, GLM", gguf.GGMLQuantizationType.Q8_0
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 64, "v_head_dim": 32}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 4}  # none that roundings choose
    reference = random_model(config := glm4_moe_lite(**sizes))
    keys = {f"deepseek2.{key}": value for key, value in keys_of(config, name).items()}
    written, rounded = tensors_of(config, reference.state_dict(), name), {}
    for tensor in (name for name in written if "_k_b." in name or "_v_b." in name):
        blocks = gguf.quants.quantize(written[tensor], kind)
        rounded[tensor] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        written[tensor] = (blocks, kind)
    for number, layer in enumerate(reference.model.layers):
        of_keys, of_values = (rounded[f"blk.{number}.attn_{part}_b.weight"] for part in "kv")
        heads = torch.cat([of_keys.transpose(1, 2), of_values], 1).flatten(0, 1)
        layer.self_attn.kv_b_proj.weight.copy_(heads)
    file = write_gguf({"general.architecture": "deepseek2", **keys}, written)
    files = open_model_files(str(file), report=print)
    given = files.tensors(keeps_blocks=True)
    model = load_model(files.config, given, dtype=torch.float32, ops=ops)
    num_bytes = sum(each[0].size for each in written.values() if isinstance(each, tuple))
    assert ops.weight_packing(torch.float32).bytes_by_format()["Q8_0"] == num_bytes
    token_lists = sequences((19, 5))
    logits, expected = paged_logits(model, token_lists), full_logits(reference, token_lists)
    for each, wanted in zip(logits, expected, strict=True):
        assert (each - wanted).norm() < 0.03 * wanted.norm()


@torch.inference_mode()
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_files_head_for_drafts_has_the_logits_of_the_published_formula(ops, write_gguf):
    """llama.cpp keeps that of GLM-4.7-Flash, as a layer behind the model's own."""
    name, config = "deepseek2, GLM", CONFIGS["deepseek2, GLM"]
    published = PublishedMTP(reference := random_model(config))
    keys = keys_of(config, name) | {"block_count": 4, "nextn_predict_layers": 1}
    tensors, layer = tensors_of(config, reference.state_dict(), name), {}
    for own, tensor in published.tensors.items():
        part = own.removeprefix("model.layers.3.")
        if part.startswith(("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")):
            part = part.replace("shared_head.norm", "shared_head_norm")
            tensors[f"blk.3.nextn.{part}"] = tensor.numpy()
        else:
            layer[own] = tensor
    tensors |= tensors_of(config, layer, name)
    keys = {f"deepseek2.{key}": value for key, value in keys.items()}
    file = write_gguf({"general.architecture": "deepseek2", **keys}, tensors)
    files, kept = open_model_files(str(file), report=print), {"dtype": torch.float32, "ops": ops}
    model = load_model(files.config, files.tensors(), **kept)
    head = load_mtp_head(files.config, files.tensors(), model, **kept)
    generator, context = torch.Generator().manual_seed(1), context_for(head, 19, ops)
    hidden_TE = torch.randn(19, config.hidden_size, generator=generator)
    ids_T = torch.randint(131, (19,), generator=generator)
    rows = head.remember(ids_T, torch.arange(19), hidden_TE, context)
    expected, _ = published(ids_T[None], hidden_TE[None])
    torch.testing.assert_close(head.guess(rows, context)[0], expected[0], rtol=1e-4, atol=1e-4)
