"""How checkpoints of EAGLE-3 heads spell their options: those of SafeAILab, SpecForge and ModelOpt,
and the speculators library's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.families.dense import llama

_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_drafting": False,
}
"""Options that change the arithmetic, and the value that is computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """
    Attributes:
        layer: of the head's one layer and its norms, as of a model of one layer.
        draft_vocab_size: tokens that the head can guess.
        state_layers: of the target: the states that enter these are the head's input.
        norm_before_residual: the residual stream begins behind `hidden_norm`.
        norm_before_fc: the states side by side are normed together before they are combined.
        fc_norm: each of them is.
        norm_output: the next pass takes the hidden state behind the last norm.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an EAGLE-3 head's; SafeAILab's are told by their vocabulary."""
    names = "".join(map(str, config.get("architectures") or ())).lower()
    kind = config.get("speculators_model_type")
    return kind == "eagle3" or "eagle3" in names or "draft_vocab_size" in config


def read_eagle_config(config: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """The head of a config.json for this target.

    Raises:
        UnsupportedArchitecture: an option that is not computed here.
        ModelConfigError: a field is missing or impossible, or the head is another model's.
    """
    inner = config.get("transformer_layer_config") or {}
    fields = ConfigFields({**config, **inner, **(config.get("eagle_config") or {})})
    for name, computed in _FIXED.items():
        if fields.flag(name, computed) is not computed:
            raise UnsupportedArchitecture(f"{name} {not computed} of a head is not supported")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise UnsupportedArchitecture("a head with sliding attention is not supported")
    layer = llama.read(fields)
    if layer.spec.num_layers != 1:
        raise UnsupportedArchitecture(
            f"heads of {layer.spec.num_layers} layers are not supported, only of 1"
        )
    layer = replace(layer, rotary=(replace(layer.rotary[0], sections=()),))  # prompts are text
    if target.embedding_scale is not None:
        raise UnsupportedArchitecture("heads are for models like Llama and Qwen 3, not for Gemma")
    target_hidden_size = fields.positive_int("target_hidden_size", layer.spec.hidden_size)
    if target_hidden_size != target.spec.hidden_size:
        raise ModelConfigError(
            f"the head reads hidden states of {target_hidden_size}, the model's have "
            f"{target.spec.hidden_size}"
        )
    draft_vocab_size = fields.positive_int("draft_vocab_size", layer.spec.vocab_size)
    if draft_vocab_size > layer.spec.vocab_size:
        raise ModelConfigError(
            f"draft_vocab_size is {draft_vocab_size}, the vocabulary has {layer.spec.vocab_size}"
        )
    return EagleConfig(
        # angles go on behind the positions that a head was trained on
        layer=replace(layer, spec=replace(layer.spec, max_model_len=target.spec.max_model_len)),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        state_layers=_state_layers(fields, target.spec.num_layers),
        norm_before_residual=fields.flag("norm_before_residual", bool(inner)),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
    )


def _state_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Two ways to count are in use: SpecForge's lists begin with 1 and name layers by what leaves
    them, others by what enters them (as SGLang tells them apart)."""
    given = fields.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        given = [2, num_layers // 2, num_layers - 3]
    elif isinstance(given, list) and given[0] == 1:
        given = [layer + 1 for layer in given]
    if not isinstance(given, list) or not all(layer in range(num_layers + 1) for layer in given):
        raise ModelConfigError(
            f"the head reads hidden states of layers {given}, the model has {num_layers}"
        )
    if len(set(given)) != len(given):
        raise ModelConfigError(f"the head reads hidden states of layers {given}, one of them twice")
    return tuple(sorted(given))
