"""Fields of a config.json that families spell in ways of their own: transformers' `attribute_map`s,
for what is read before, or without, a model's own code."""

from collections.abc import Mapping
from typing import Any

SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "emb_dim", "embed_dim"),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        *("max_sequence_length", "n_ctx"),
    ),
}


def size_in(config: Mapping[str, Any], name: str) -> int | None:
    """The whole number of this name, by its common or another spelling, of the text model where
    there are several; None: it is not there."""
    inner = config.get("text_config")
    for fields in (inner, config) if isinstance(inner, Mapping) else (config,):
        for spelling in SPELLINGS[name]:
            value = fields.get(spelling)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
