"""Tiny random encoders of every family by transformers, and our model over a step. Not a test."""

import torch
import transformers

from engine_core.models.encoders.encoder import Encoder
from engine_core.models.loading import load_model
from kernels.interface.operations import AttentionSpec, ForwardContext
from tests.kernels.paged_steps import make_cache

VOCAB_SIZE = 99
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 160,
}
_DISTIL = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}
_DISTIL |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 160}
_MODERN = _SMALL | {"local_attention": 16, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
_MODERN |= {f"{name}_token_id": 1 for name in ("pad", "cls", "bos", "eos", "sep")}
_ALBERT = _SMALL | {"embedding_size": 32, "num_hidden_groups": 2}
_DEBERTA = _SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_DEBERTA |= {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
_DEBERTA |= {"position_biased_input": False, "max_position_embeddings": 160}
_T5 = {"vocab_size": VOCAB_SIZE, "d_model": 48, "d_kv": 20, "d_ff": 80, "num_heads": 3}
_T5 |= {"num_layers": 3}

CONFIGS = {
    "Bert": lambda **more: transformers.BertConfig(**_SMALL, **more),
    "Roberta": lambda **more: transformers.RobertaConfig(**_SMALL, **more),
    "XLMRoberta": lambda **more: transformers.XLMRobertaConfig(**_SMALL, **more),
    "Camembert": lambda **more: transformers.CamembertConfig(**_SMALL, **more),
    "Electra": lambda **more: transformers.ElectraConfig(**_SMALL | {"embedding_size": 32} | more),
    "MPNet": lambda **more: transformers.MPNetConfig(**_SMALL, **more),
    "DistilBert": lambda **more: transformers.DistilBertConfig(**_DISTIL, **more),
    "Gte": lambda **more: transformers.GteConfig(**_SMALL, **more),
    "JinaEmbeddingsV3": lambda **more: transformers.JinaEmbeddingsV3Config(**_SMALL, **more),
    "NomicBert": lambda **more: transformers.NomicBertConfig(**_SMALL, **more),
    "Albert": lambda **more: transformers.AlbertConfig(**_ALBERT | more),
    "DebertaV2": lambda **more: transformers.DebertaV2Config(**_DEBERTA | more),
    "ModernBert": lambda **more: transformers.ModernBertConfig(**_MODERN, **more),
}


BARE = {"T5Encoder": lambda **more: transformers.T5Config(**_T5 | more)}
"""Those that have no heads at all."""


def reference(family, kind="Model", **options):
    """transformers' model with weights that no part can be left out of unseen."""
    torch.manual_seed(len(family + kind))
    model = getattr(transformers, family + kind)((CONFIGS | BARE)[family](**options)).eval()
    for tensor in model.parameters():
        tensor.data.add_(torch.randn_like(tensor) * 0.05)
    return model


def own(model, ops, dtype=torch.float32):
    """Ours, of its weights."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    loaded = load_model(config, model.state_dict().items(), dtype=dtype, ops=ops)
    assert isinstance(loaded, Encoder)
    return loaded


def token_types(model, prompts):
    """The second half of each prompt is of the second type, where the model has two."""
    has_two = getattr(model.config, "type_vocab_size", 1) == 2
    return [(torch.arange(len(ids)) >= len(ids) // 2).long() * has_two for ids in prompts]


def hidden_states(model, prompts, types):
    """By transformers, a prompt at a time."""
    body = getattr(model, model.base_model_prefix, model)
    typed = getattr(model.config, "type_vocab_size", 1) == 2
    with torch.inference_mode():
        return [
            body(ids[None], **({"token_type_ids": kind[None]} if typed else {})).last_hidden_state[
                0
            ]
            for ids, kind in zip(prompts, types, strict=True)
        ]


def run(model, ops, prompts, types, block_size=16):
    """By ours, all prompts in one step, each from a block of its own; a tensor a prompt."""
    spec, keys = model.spec, model.spec.keys_of(0)
    lengths = torch.tensor([len(ids) for ids in prompts])
    blocks = -(-lengths // block_size)
    first = blocks.cumsum(0) - blocks
    shape = int(blocks.sum()), block_size, keys.num_kv_heads, keys.key_size
    caches = [make_cache(ops, *shape, torch.float32)] * spec.num_layers
    positions = [torch.arange(length) for length in lengths.tolist()]
    slots = [at * block_size + own for at, own in zip(first, positions, strict=True)]
    table = (first[:, None] + torch.arange(int(blocks.max()))).clamp(max=int(blocks.sum()) - 1)
    plans = {
        window: ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=keys.num_kv_heads,
                head_size=keys.key_size,
                block_size=block_size,
                sliding_window=window,
                max_num_seqs=len(prompts),
                max_num_batched_tokens=int(lengths.sum()),
                max_model_len=512,
                dtype=torch.float32,
                kv_dtype=torch.float32,
                bidirectional=True,
            )
        ).plan(
            query_start_loc_R1=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            seq_lens_R=lengths.int(),
            block_table_RM=table.int(),
            slot_mapping_T=torch.cat(slots),
            num_decodes=0,
            num_decode_tokens=0,
        )
        for window in {layer.reach for layer in spec.layers}
    }
    places = [own + model.num_positions * kind for own, kind in zip(positions, types, strict=True)]
    context = ForwardContext(caches, [plans[layer.reach] for layer in spec.layers], ops)
    with torch.inference_mode():
        hidden = model.forward(torch.cat(prompts), torch.cat(places), context)
    return hidden.split(lengths.tolist())
