"""Rotary embedding: GGUF's keys and its tensor of factors to transformers' `rope_parameters`.

Must not know anything else about a model.
"""

import math
from collections.abc import Sequence
from typing import Any

from engine_core.model_files.gguf.metadata import GgufMetadata

LOCAL_ROPE_THETA = 10_000.0  # Gemma 3's layers with a window
_DEFAULT_THETA = {"gemma3": 1_000_000.0}
# transformers' and llama.cpp's own defaults agree on these
_BETA_FAST, _BETA_SLOW = 32.0, 1.0

# Llama 3.1 and 3.2 have these two and 8192; other lengths are tried for models made in their image
_LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ = 1.0, 4.0
_LLAMA3_ORIGINAL_LENS = (8192, *(1 << power for power in range(4, 22)))


def rope_parameters(meta: GgufMetadata) -> dict[str, Any]:
    """`rope_parameters` of the config, without the tensor of factors.

    Raises:
        UnsupportedModelFile: a kind of scaling that is not read.
    """
    theta = float(meta.number("rope.freq_base", _DEFAULT_THETA.get(meta.architecture, 10_000.0)))
    kind = meta.number("rope.scaling.type", None)
    # before there were kinds there was one number, for linear scaling
    factor = float(meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)))
    if kind is None and factor not in (0.0, 1.0):
        kind = "linear"
    if kind in (None, "none") or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        meta.refuse(f"rotary scaling {kind!r}")
    if meta.number("rope.scaling.yarn_log_multiplier", 0.0):
        meta.refuse("rotary scaling with a YaRN log multiplier")
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": int(
            meta.number("rope.scaling.original_context_length")
        ),
        "beta_fast": float(meta.number("rope.scaling.yarn_beta_fast", _BETA_FAST)),
        "beta_slow": float(meta.number("rope.scaling.yarn_beta_slow", _BETA_SLOW)),
    } | _attention_factor(meta, factor)


def _attention_factor(meta: GgufMetadata, factor: float) -> dict[str, float]:
    """llama.cpp multiplies YaRN's own attention factor by a number of the file, if it has one."""
    extra = float(
        meta.number("rope.scaling.yarn_attn_factor", meta.number("rope.scaling.attn_factor", 1.0))
    )
    return {} if extra == 1.0 else {"attention_factor": extra * (0.1 * math.log(factor) + 1.0)}


def apply_frequency_factors(
    parameters: dict[str, Any], factors: Sequence[float], head_dim: int
) -> dict[str, Any]:
    """Account for the tensor `rope_freqs.weight`, by which each inverse frequency is divided.

    llama.cpp's converter writes Llama 3's frequency-dependent scaling that way; the parameters that
    give these factors are found again, so that the config is the model's own.

    Args:
        parameters: as `rope_parameters` gave them, of type "default".
        factors: head_dim / 2 numbers, highest frequency first.

    Returns:
        `parameters` for the factors.

    Raises:
        ValueError: no parameters of Llama 3's formula give the factors.
    """
    if all(factor == 1.0 for factor in factors):
        return parameters
    for original_len in _LLAMA3_ORIGINAL_LENS:
        candidate = {
            "rope_type": "llama3",
            "rope_theta": parameters["rope_theta"],
            # the lowest frequencies are divided by the factor itself
            "factor": float(round(max(factors), 4)),
            "low_freq_factor": _LLAMA3_LOW_FREQ,
            "high_freq_factor": _LLAMA3_HIGH_FREQ,
            "original_max_position_embeddings": original_len,
        }
        expected = _llama3_factors(candidate, head_dim)
        if len(expected) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
        ):
            break
    else:
        raise ValueError("its rotary frequency factors are not Llama 3's")
    if parameters["rope_type"] != "default":
        raise ValueError(f"it has rotary frequency factors and {parameters['rope_type']} scaling")
    return candidate


def _llama3_factors(parameters: dict[str, Any], head_dim: int) -> list[float]:
    """The formula of transformers' `_compute_llama3_parameters`, as divisors."""
    factor, low, high = (
        parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = parameters["original_max_position_embeddings"]
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors
