"""T5's encoder: RMS norms before, a learned bias for distances, no scale; sentence-t5, GTR."""

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    EncoderNames,
    read_activation,
    refuse_unless,
)
from engine_core.models.families.family import Family
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import paged_keys

_ATTENTION = "encoder.block.{}.layer.0.SelfAttention."
_FEED_FORWARD = "encoder.block.{}.layer.1.DenseReluDense."


def read_t5_encoder(fields: ConfigFields) -> EncoderConfig:
    refuse_unless(fields, relative_attention_max_distance=128)
    num_layers, num_heads = (
        fields.positive_int("num_layers", 6),
        fields.positive_int("num_heads", 8),
    )
    kind = fields.text("feed_forward_proj", "relu")
    gated, name = kind.startswith("gated-"), kind.removeprefix("gated-")
    name = "gelu_new" if kind == "gated-gelu" else name
    up = ("wi_0", "wi_1") if gated else ("wi",)
    return EncoderConfig(
        spec=ModelSpec(
            layers=paged_keys(num_heads, fields.positive_int("d_kv", 64), (None,) * num_layers),
            num_query_heads=num_heads,
            hidden_size=fields.positive_int("d_model", 512),
            vocab_size=fields.positive_int("vocab_size", 32_128),
            max_model_len=fields.positive_int("n_positions", 512),
        ),
        intermediate_size=fields.positive_int("d_ff", 2048),
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-6),
        rms_norm=True,
        activation=read_activation(fields.with_values({"act": name}), "act", gated=gated),
        pre_norm=True,
        gated=gated,
        attention_bias=False,
        attention_scale=1.0,
        up_bias=False,
        down_bias=False,
        num_distance_buckets=fields.positive_int("relative_attention_num_buckets", 32),
        rotary=(None,) * num_layers,
        names=EncoderNames(
            words="shared",
            positions=None,
            token_types=None,
            embedding_norm=None,
            qkv=tuple(f"{_ATTENTION}{part}" for part in "qkv"),
            attention_output=f"{_ATTENTION}o",
            attention_norm="encoder.block.{}.layer.0.layer_norm",
            up=tuple(f"{_FEED_FORWARD}{part}" for part in up),
            down=f"{_FEED_FORWARD}wo",
            output_norm="encoder.block.{}.layer.1.layer_norm",
            final_norm="encoder.final_layer_norm",
            distance_bias=f"{_ATTENTION.format(0)}relative_attention_bias",
        ),
    )


FAMILIES = (
    Family(
        names=("T5EncoderModel",),
        model_type="t5-encoder",  # that of the files is of the whole T5
        read=read_t5_encoder,
        is_encoder=True,
        ignored_prefixes=("encoder.embed_tokens.", "decoder.", "lm_head."),
    ),
)
