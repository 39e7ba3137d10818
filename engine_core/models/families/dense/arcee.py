"""Arcee (AFM): Llama, whose feed-forward has no gate and squares its ReLU."""

from dataclasses import replace

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import PROJECTIONS, TWO_NORMS, Fields, Gguf, Metadata


def read(fields: ConfigFields, rotary: RotaryConfig | None = None) -> ModelConfig:
    """`rotary`: the angles; None: those of the config."""
    activation = fields.text("hidden_act", "relu2")
    if activation != "relu2":
        raise UnsupportedArchitecture(f'activation "{activation}" of Arcee, only relu2')
    like_llama = fields.with_values({"hidden_act": "silu"})
    config = llama.read(like_llama, rotary)
    max_model_len = fields.positive_int("max_position_embeddings", 4096)
    return replace(
        config,
        spec=replace(config.spec, max_model_len=max_model_len),
        norm_eps=fields.positive_float("rms_norm_eps", 1e-5),
        activation="relu2",
    )


_FEED_FORWARD = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GGUF_LAYER = PROJECTIONS | TWO_NORMS | _FEED_FORWARD


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return llama.gguf_fields(meta, config) | {"hidden_act": "relu2"}


FAMILIES = (
    Family(
        names=("ArceeForCausalLM", "ArceeModel", "ArceeForSequenceClassification"),
        model_type="arcee",
        read=read,
        gguf=Gguf(
            architecture="arcee",
            layer=GGUF_LAYER,
            fields=_gguf_fields,
            pairs_rows=True,
        ),
    ),
)
