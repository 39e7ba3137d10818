"""Fields of a config.json that families spell in ways of their own: transformers' `attribute_map`s,
for what is read before, or without, a model's own code."""

from collections.abc import Mapping
from typing import Any

from engine_core.models.text_part import inner_text

SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "emb_dim", "embed_dim"),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        *("max_sequence_length", "n_ctx"),
    ),
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name of a config's model, to show: its "architectures", else its "model_type"."""
    names = config.get("architectures") or [config.get("model_type")]
    return ", ".join(map(str, names if isinstance(names, list) else [names]))


def size_in(config: Mapping[str, Any], name: str) -> int | None:
    """The whole number of this name, by its common or another spelling, of the text model where
    there are several; None: it is not there."""
    inner = inner_text(config)
    for fields in (config,) if inner is None else (inner, config):
        for spelling in SPELLINGS[name]:
            value = fields.get(spelling)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
