"""Tables of angles of rotary position embeddings, by the formulas of transformers'
modeling_rope_utils: linear interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), Llama
3.1's scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Blend by number of rotations in the original context; cos and sin times a factor."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class ExplicitScaling:
    """Each frequency is divided by its own factor, as llama.cpp stores them."""

    factors: tuple[float, ...]


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling | ExplicitScaling


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What decides a table. `rotary_size` elements of a head turn."""

    rotary_size: int
    theta: float
    scaling: RotaryScaling | None


def inverse_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """(float32 radians a position for each of rotary_size / 2 pairs, factor on cos and sin)."""
    size = config.rotary_size
    powers = config.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    plain = 1.0 / powers
    match config.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case ExplicitScaling(factors=factors):
            return plain / torch.tensor(factors, dtype=torch.float32), 1.0
        case Llama3Scaling():
            return _llama3(plain, config.scaling), 1.0
        case YarnScaling():
            return _yarn(powers, config.theta, config.scaling), config.scaling.attention_factor
        case _:
            assert_never(config.scaling)


def rotary_table(config: RotaryConfig, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """cos_sin_PD: [num_positions, rotary_size], cosines then sines, computed in float32."""
    frequencies, factor = inverse_frequencies(config)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat([angles.cos().mul_(factor), angles.sin().mul_(factor)], dim=1).to(dtype)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    context = scaling.original_max_position
    low_wavelength = context / scaling.low_freq_factor
    high_wavelength = context / scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > low_wavelength, plain / scaling.factor, plain)
    smooth = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, blended, scaled)


def _yarn(powers: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    size = 2 * powers.shape[0]

    def pair_with(num_rotations: float) -> float:
        """Index of the pair that turns so often within the original context."""
        turns = scaling.original_max_position / (num_rotations * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
