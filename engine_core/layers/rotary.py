"""Tables of angles of rotary position embeddings, by the formulas of transformers'
modeling_rope_utils: linear interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), Llama
3.1's"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What decides a table.

    Attributes:
        inverse_frequencies: radians a position, for each pair of elements that turns.
        factor: on cosines and sines.
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0


def rotary_table(config: RotaryConfig, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """cos_sin_PD: [num_positions, rotary_size], cosines then sines, computed in float32."""
    frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat(
        [angles.cos().mul_(config.factor), angles.sin().mul_(config.factor)], dim=1
    ).to(dtype)


def plain_frequencies(size: int, theta: float) -> torch.Tensor:
    """float32 [size / 2], for `size` elements of a head."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def llama3_frequencies(
    plain: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    low_wavelength = original_max_position / low_freq_factor
    high_wavelength = original_max_position / high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > low_wavelength, plain / factor, plain)
    smooth = (original_max_position / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, blended, scaled)


def yarn_frequencies(
    size: int,
    theta: float,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> torch.Tensor:
    """Blend by number of rotations in the original context."""

    def pair_with(num_rotations: float) -> float:
        """Index of the pair that turns so often within the original context."""
        turns = original_max_position / (num_rotations * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
