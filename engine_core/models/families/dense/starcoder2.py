"""StarCoder 2: layer norms, biases everywhere, a feed-forward without a gate, maybe a window."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_window
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import PROJECTIONS, TWO_NORMS, Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(
        fields,
        default_max_position=4096,
        default_num_kv_heads=2,
        default_tied=True,
        default_activation="gelu_pytorch_tanh",
        sliding_windows=(read_window(fields),) * fields.positive_int("num_hidden_layers"),
    )
    biased = fields.flag("use_bias", True)
    return replace(
        config,
        norm_eps=fields.positive_float("norm_epsilon", 1e-5),
        norm_bias=True,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        mlp_gated=False,
    )


_FEED_FORWARD = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config["rms_norm_eps"],
        "sliding_window": int(meta.number("attention.sliding_window", 0)) or None,
        "use_bias": "blk.0.ffn_down.bias" in meta.tensors,
    }


FAMILIES = (
    Family(
        names=("Starcoder2ForCausalLM", "Starcoder2Model", "Starcoder2ForSequenceClassification"),
        model_type="starcoder2",
        read=read,
        tensor_suffixes=tuple(
            (f"mlp.{theirs}.{kind}", f"mlp.{ours}.{kind}")
            for theirs, ours in (("c_fc", "up_proj"), ("c_proj", "down_proj"))
            for kind in ("weight", "bias")
        ),
        gguf=Gguf(
            architecture="starcoder2",
            layer=PROJECTIONS | TWO_NORMS | _FEED_FORWARD,
            fields=_gguf_fields,
            top={"output_norm.bias": "model.norm.bias"},
            norm_eps="attention.layer_norm_epsilon",
        ),
    ),
)
