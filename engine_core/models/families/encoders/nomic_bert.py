"""NomicBERT: BERT with rotation, a gate and no biases; nomic-embed-text, CodeRankEmbed."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig, refuse_unless
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoder_gguf import encoder_fields, encoder_gguf
from engine_core.models.families.encoders.bert import bert_head
from engine_core.models.families.encoders.gte import ROTATED_NAMES, read_rotated
from engine_core.models.families.gguf import Fields, Metadata

_FIRST_SPELLING = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "max_position_embeddings": "max_trained_positions",
}
"""Fields of a config.json, and what the first code calls them. Its `n_positions` is beyond what a
model was trained for, which other angles reach."""
_DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "type_vocab_size": 2}
_DEFAULTS |= {"vocab_size": 30_528}
_OFF = (
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "causal"),
    *("parallel_block", "prenorm", "rotary_emb_interleaved", "moe_every_n_layers"),
)
_THETA, _PACKED = 1000.0, "attn.Wqkv"
_GATES = {"swiglu": "silu", "geglu": "gelu"}


def read_nomic_bert(fields: ConfigFields) -> EncoderConfig:
    given = {name: fields.get(first) for name, first in _FIRST_SPELLING.items()}
    gate = fields.get("activation_function")
    if gate is not None and gate not in _GATES:
        raise UnsupportedArchitecture(
            f'activation_function "{gate}" is not supported; supported: {", ".join(_GATES)}'
        )
    given["hidden_act"] = _GATES.get(gate)
    known = {name: value for name, value in given.items() if value is not None}
    fields = fields.with_defaults(_DEFAULTS | known)
    refuse_unless(fields, **dict.fromkeys(_OFF, False))
    refuse_unless(fields, rotary_emb_fraction=1.0, rotary_emb_scale_base=None)
    nomic = read_rotated(fields, theta=_THETA, packed=_PACKED)
    refuse_unless(fields, head_dim=nomic.spec.keys_of(0).key_size)
    return replace(nomic, attention_bias=False, down_bias=False)


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return encoder_fields(meta, config) | {"hidden_act": "silu"}


FAMILIES = encoder_family(
    "NomicBert",
    "nomic_bert",
    read_nomic_bert,
    bert_head,
    base="nomic_bert.",
    unused=("pooler.", "cls.", "classifier."),
    layers={"encoder.layers.": "layers."},
    renamed={
        "emb_ln": "embeddings.LayerNorm",
        "attn.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
    },
    gguf=encoder_gguf(
        "nomic-bert", ROTATED_NAMES, packed=_PACKED, fields=_gguf_fields, theta=_THETA
    ),
)
