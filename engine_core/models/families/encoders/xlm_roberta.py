"""XLM-R: RoBERTa for many languages; jina-embeddings v3 is one whose positions turn."""

from dataclasses import replace

from engine_core.layers.config import InterleavedRows
from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig, TaskAdapters
from engine_core.models.errors import ModelConfigError
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoder_gguf import encoder_gguf
from engine_core.models.families.encoders.bert import BERT_NAMES, read_roberta, roberta_head
from engine_core.models.rotary_config import read_rotary

_PACKED = "mixer.Wqkv"
_QKV = ("query", "key", "value")
_JINA: dict[str, float] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
_JINA |= {"num_hidden_layers": 24, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5}
_JINA |= {"type_vocab_size": 1, "vocab_size": 250_002, "rope_theta": 20_000.0}
"""Fields of a JinaEmbeddingsV3Config that a config.json may leave out."""
_RENAMED = {
    "emb_ln": "embeddings.LayerNorm",
    "mixer.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "output.LayerNorm",
    **{f"self_attn.{name[0]}_proj": f"attention.self.{name}" for name in _QKV},
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "post_mlp_layernorm": "output.LayerNorm",
}
"""Modules of Jina's own code of XLM-R, then those of transformers', to XLM-R's."""


def _packed(encoder: EncoderConfig) -> EncoderConfig:
    parts = tuple((f"attention.self.{name}", (encoder.spec.hidden_size,)) for name in _QKV)
    return replace(encoder, interleaved=(InterleavedRows(_PACKED, 1, parts),))


def read_jina(fields: ConfigFields) -> EncoderConfig:
    """XLM-R with rotation in the place of embedded positions."""
    fields = fields.with_defaults(_JINA)
    jina = _packed(read_roberta(fields.with_values({"position_embedding_type": None}), first=0))
    rotary = read_rotary(fields, head_size=jina.spec.keys_of(0).key_size)
    return replace(
        jina,
        rotary=(rotary,) * jina.spec.num_layers,
        names=replace(jina.names, positions=None),
        task_adapters=_task_adapters(fields),
    )


def _task_adapters(fields: ConfigFields) -> TaskAdapters | None:
    tasks, asked = fields.get("lora_adaptations") or [], fields.get("jina_task")
    if asked is not None and asked not in tasks:
        raise ModelConfigError(
            f"config: jina_task is {asked!r}, the tasks of this checkpoint are "
            f"{', '.join(tasks) or 'none'}; name one of them, or leave it out"
        )
    if not tasks:
        return None
    scale = fields.positive_float("lora_alpha", 1.0) / fields.positive_int("lora_rank", 4)
    return TaskAdapters(None if asked is None else tasks.index(asked), scale)


def read_xlm_roberta(fields: ConfigFields) -> EncoderConfig:
    if fields.get("position_embedding_type") != "rotary":
        return _packed(read_roberta(fields))
    theta = fields.positive_float("rotary_emb_base", 10_000.0)
    return read_jina(fields.with_defaults({"rope_theta": theta}))


_JINA_GGUF = encoder_gguf(
    "jina-bert-v3",
    replace(BERT_NAMES, positions=None),
    packed=_PACKED,
    theta=_JINA["rope_theta"],
)

FAMILIES = tuple(
    family
    for stem, model_type, read, gguf in (
        ("XLMRoberta", "xlm-roberta", read_xlm_roberta, None),
        ("JinaEmbeddingsV3", "jina_embeddings_v3", read_jina, _JINA_GGUF),
    )
    for family in encoder_family(
        stem,
        model_type,
        read,
        roberta_head,
        base="roberta.",
        unused=("pooler.", "lm_head.", "classifier."),
        layers={"encoder.layers.": "encoder.layer.", "layers.": "encoder.layer."},
        renamed=_RENAMED,
        gguf=gguf,
    )
)
