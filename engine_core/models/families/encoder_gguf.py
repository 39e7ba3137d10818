"""How llama.cpp's files spell an encoder, by the names that its checkpoints have."""

from collections.abc import Callable

from engine_core.models.encoders.encoder_configs import EncoderNames
from engine_core.models.families.gguf import Fields, Gguf, Metadata


def encoder_fields(meta: Metadata, config: Fields) -> Fields:
    """What encoders' config.json have and decoders' have not. The activation is not in the file:
    it is that of the published models."""
    has_types, eps = "token_types.weight" in meta.tensors, config["rms_norm_eps"]
    fields = {
        "hidden_act": "gelu",
        "layer_norm_eps": eps,
        "type_vocab_size": meta.num_rows("token_types.weight") if has_types else 0,
    }
    if "position_embd.weight" in meta.tensors:  # without the rows that no position has
        fields["max_position_embeddings"] = meta.num_rows("position_embd.weight")
    return fields


def encoder_gguf(
    architecture: str,
    names: EncoderNames,
    *,
    packed: str | None = None,
    fields: Callable[[Metadata, Fields], Fields] = encoder_fields,
    theta: float = 10_000.0,
) -> Gguf:
    """Files of an encoder without a head.

    Args:
        names: in the checkpoints that the file becomes.
        packed: the tensor of a layer that holds queries, keys and values, where names have three.
        theta: of the angles, where the file does not say.
    """
    layers = names.down.partition("{}")[0]
    is_pre_norm = names.final_norm is not None
    parts = {
        "attn_output": names.attention_output,
        "attn_norm" if is_pre_norm else "attn_output_norm": names.attention_norm,
        "ffn_norm" if is_pre_norm else "layer_output_norm": names.output_norm,
        "ffn_down": names.down,
        **dict(zip(("ffn_up", "ffn_gate"), reversed(names.up), strict=False)),
    }
    qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
    parts |= dict(zip(qkv, names.qkv, strict=True))
    layer = {part: name.removeprefix(f"{layers}{{}}.") for part, name in parts.items()}
    tops = {
        "token_embd": names.words,
        "token_embd_norm": names.embedding_norm,
        "token_types": names.token_types,
        "position_embd": names.positions,
        "output_norm": names.final_norm,
    }
    return Gguf(
        architecture=architecture,
        layer=layer | ({"attn_qkv": packed} if packed else {}),
        layers=layers,
        fields=fields,
        top={
            f"{tensor}.{kind}": f"{name}.{kind}"
            for tensor, name in tops.items()
            if name is not None
            for kind in ("weight", "bias")
        },
        theta=theta,
        norm_eps="attention.layer_norm_epsilon",
        is_causal=False,
    )
