"""Rotary options of a config.json, as transformers 5 reads them (`RotaryEmbeddingConfigMixin`).

old   "rope_theta": 1e6, "rope_scaling": {"type" or "rope_type": "yarn", "factor": 4, ...}
new   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, ...}
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import RotaryConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture

if TYPE_CHECKING:
    import torch

_SUPPORTED = "default, linear, llama3, ntk, proportional, yarn"
_MROPE_SECTIONS = (16, 24, 24)


def read_rotary(
    fields: ConfigFields,
    *,
    head_size: int,
    default_theta: float = 10_000.0,
    turns_a_part: bool = False,
) -> RotaryConfig:
    """One set of angles for all layers. `turns_a_part`: only so much of a head turns as
    partial_rotary_factor says; elsewhere that is refused."""
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedArchitecture(
            "rope_parameters differ between layers, which this model type has no code for"
        )
    return _resolve(
        dict(parameters),
        fields,
        fields.positive_float("rope_theta", default_theta),
        head_size,
        fields.get("rope_freq_factors"),
        turns_a_part=turns_a_part,
    )


def read_rotary_by_layer_type(
    fields: ConfigFields,
    *,
    head_size: int,
    full_theta: float,
    sliding_theta: float,
    full_head_size: int | None = None,
) -> dict[str, RotaryConfig]:
    """Gemma 3, ModernBERT: angles of their own for "full_attention" and for "sliding_attention"
    layers. In the old spelling `rope_scaling` is for the full layers only.
    `full_theta`, `sliding_theta`: where the new spelling does not say. `full_head_size`: None: all
    heads are equal."""
    nested = fields.mapping("rope_parameters") or {}
    full = dict(nested.get("full_attention") or {}) | (fields.mapping("rope_scaling") or {})
    sliding = dict(nested.get("sliding_attention") or {})
    if fields.get("rope_freq_factors") is not None:
        raise UnsupportedArchitecture("rope_freq_factors with angles by kind of layer")
    return {
        "full_attention": _resolve(full, fields, full_theta, full_head_size or head_size, None),
        "sliding_attention": _resolve(sliding, fields, sliding_theta, head_size, None),
    }


def _resolve(
    parameters: dict[str, Any],
    fields: ConfigFields,
    theta: float,
    head_size: int,
    freq_factors: Any,
    *,
    turns_a_part: bool = False,
) -> RotaryConfig:
    import torch

    from engine_core.layers.rotary import plain_frequencies

    options = ConfigFields(parameters)
    partial = options.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    kind = options.text("rope_type", options.text("type", "default"))
    if kind == "proportional":  # the angles of a whole head, of which the last ones stand still
        plain = plain_frequencies(head_size, options.positive_float("rope_theta", theta))
        plain[int(partial * head_size // 2) :] = 0.0
        return _config(plain / options.positive_float("factor", 1.0))
    if turns_a_part and 0.0 < partial <= 1.0:
        head_size = int(head_size * partial)
    elif partial != 1.0:
        raise UnsupportedArchitecture(f"partial_rotary_factor {partial} is not supported, only 1")
    if head_size % 2:
        raise UnsupportedArchitecture(f"heads of odd size {head_size} cannot be rotated in halves")
    theta = options.positive_float("rope_theta", theta)
    plain = plain_frequencies(head_size, theta)
    if freq_factors is not None:
        if kind != "default":
            raise UnsupportedArchitecture(f'rope_freq_factors with rope type "{kind}"')
        if len(freq_factors) != head_size // 2:
            raise ModelConfigError(
                f"config: rope_freq_factors has {len(freq_factors)} entries, heads of "
                f"{head_size} have {head_size // 2} frequencies"
            )
        return _config(plain / torch.tensor(freq_factors, dtype=torch.float32))
    found = _scaled(kind, options, fields, plain, theta)
    if kind == "mrope" or options.get("mrope_section") is not None:
        found = replace(found, sections=_sections(options, len(plain)))
    return found


def _scaled(
    kind: str, options: ConfigFields, fields: ConfigFields, plain: torch.Tensor, theta: float
) -> RotaryConfig:
    from engine_core.layers.rotary import llama3_frequencies, plain_frequencies

    head_size = 2 * len(plain)
    match kind:
        case "default" | "mrope":
            return _config(plain)
        case "linear":
            return _config(plain / options.positive_float("factor"))
        case "ntk" if options.get("mixed_b") is None:  # https://kexue.fm/archives/9706
            factor = options.positive_float("factor")
            return _config(plain_frequencies(head_size, theta * factor) / factor ** (2 / head_size))
        case "llama3":
            frequencies = llama3_frequencies(
                plain,
                factor=options.positive_float("factor"),
                low_freq_factor=options.positive_float("low_freq_factor"),
                high_freq_factor=options.positive_float("high_freq_factor"),
                original_max_position=_original_max_position(options, fields),
            )
            return _config(frequencies)
        case "yarn":
            return _resolve_yarn(options, fields, head_size, theta)
        case "longrope" if options.get("short_factor") is not None:
            return _resolve_longrope(options, fields, plain)
        case _:
            raise UnsupportedArchitecture(
                f'rope type "{kind}" is not supported; supported: {_SUPPORTED}'
            )


def _sections(options: ConfigFields, num_pairs: int) -> tuple[int, ...]:
    sections = options.get("mrope_section") or _MROPE_SECTIONS
    is_right = isinstance(sections, list | tuple) and all(isinstance(n, int) for n in sections)
    if not is_right or min(sections) < 0 or sum(sections) != num_pairs:
        raise ModelConfigError(
            f"config: mrope_section is {sections!r}, together they must be a head's {num_pairs} "
            "pairs"
        )
    if not options.get("mrope_interleaved"):
        return tuple(sections)
    # pair by pair: time, row, column, and time where a row's or column's are used up
    pairs = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs)]
    return tuple(int(axis == of_pair) for of_pair in pairs for axis in range(3))


def _config(frequencies: torch.Tensor, factor: float = 1.0) -> RotaryConfig:
    return RotaryConfig(tuple(frequencies.tolist()), factor)


def _original_max_position(options: ConfigFields, fields: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    own: int | None = fields.get(name)
    return own or options.positive_int(name, fields.get("max_position_embeddings"))


def _resolve_yarn(
    options: ConfigFields, fields: ConfigFields, head_size: int, theta: float
) -> RotaryConfig:
    from engine_core.layers.rotary import yarn_frequencies

    original = _original_max_position(options, fields)
    max_position = fields.get("max_position_embeddings")
    implied = None if max_position is None else max_position / original
    factor = options.positive_float("factor", implied)
    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = options.get("mscale"), options.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    frequencies = yarn_frequencies(
        head_size,
        theta,
        factor=factor,
        original_max_position=original,
        beta_fast=options.get("beta_fast") or 32,
        beta_slow=options.get("beta_slow") or 1,
        truncate=options.flag("truncate", True),
    )
    return _config(frequencies, float(attention_factor))


def _resolve_longrope(
    options: ConfigFields, fields: ConfigFields, plain: torch.Tensor
) -> RotaryConfig:
    """The angles of sequences up to the original length: longer ones turn all of them another
    way, which nothing that is cached could follow."""
    import torch

    short = options.get("short_factor")
    if not isinstance(short, list) or len(short) != len(plain):
        raise ModelConfigError(
            f"config: short_factor is {short!r:.40}, it must list {len(plain)} factors"
        )
    original = _original_max_position(options, fields)
    most = fields.get("max_position_embeddings") or original
    factor = options.positive_float("factor", most / original)
    on_both = options.get("attention_factor")
    if on_both is None:
        on_both = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _config(plain / torch.tensor(short, dtype=torch.float32), float(on_both))


def score_factor(fields: ConfigFields) -> float:
    """On the scores of latent attention: YaRN's with mscale_all_dim acts on both sides of them."""
    options = ConfigFields(
        fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or {}
    )
    if options.text("rope_type", options.text("type", "default")) == "default":
        return 1.0
    all_dim = options.get("mscale_all_dim")
    return _mscale(options.positive_float("factor"), all_dim) ** 2 if all_dim else 1.0


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
