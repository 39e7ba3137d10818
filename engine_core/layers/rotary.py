"""Tables of angles of rotary position embeddings, by the formulas of transformers'
modeling_rope_utils: linear interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), Llama
3.1's"""

import math

import torch

from engine_core.devices import traits_of
from engine_core.layers.config import RotaryConfig

_FIRST_ROWS = 1 << 14


class RotaryTable:
    """On a CPU a table grows with the positions that are used: a model's own limit may ask for
    gigabytes. On another device, whose graphs keep addresses, it is whole from the start.
    `limit`: positions that it never grows beyond. `cos_sin_PD`: [num_positions, rotary_size], see
    `rotary_rows`. Always the same tensor; its memory is another after `cover` has returned True."""

    def __init__(
        self, config: RotaryConfig, *, limit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._limit = limit
        num_positions = min(limit, _FIRST_ROWS) if traits_of(device).is_host else limit
        self.cos_sin_PD = rotary_rows(config, 0, num_positions, dtype).to(device)

    def cover(self, num_positions: int) -> bool:
        """Have at least these rows, or all up to the limit. Returns whether the table has grown."""
        start = self.cos_sin_PD.shape[0]
        stop = min(self._limit, 1 << (num_positions - 1).bit_length())
        if num_positions <= start or stop <= start:
            return False
        rows = rotary_rows(self._config, start, stop, self.cos_sin_PD.dtype)
        self.cos_sin_PD.resize_(stop, rows.shape[1])[start:] = rows  # what is there stays
        return True

    def fill(self, positions_AT: torch.Tensor) -> torch.Tensor:
        """Angles of one step's tokens, which have a position on each of three axes, behind the rows
        of positions; of a device. Nothing is captured yet when the largest step first comes, in the
        warm-up: so later there is room. `positions_AT`: int64 [3, T]. Returns the rows [T]."""
        table_PD, num_tokens = self.cos_sin_PD, positions_AT.shape[1]
        stop = self._limit + num_tokens
        if len(table_PD) < stop:
            table_PD.resize_(stop, table_PD.shape[1])
        axis_of_column = _axis_of_column(self._config).to(table_PD.device, non_blocking=True)
        index_TD = positions_AT[axis_of_column].T
        table_PD[self._limit : stop] = table_PD[: self._limit].gather(0, index_TD)
        return torch.arange(self._limit, stop, device=table_PD.device)


def _axis_of_column(config: RotaryConfig) -> torch.Tensor:
    """int64 [rotary_size], the axis by which each cosine, then each sine, turns."""
    axes = torch.arange(len(config.sections)) % 3
    return axes.repeat_interleave(torch.tensor(config.sections)).repeat(2)


class StepRotaryTable:
    """Angles of the tokens of one step, a row each, for tokens with a position on each of three
    axes: the table stays where it is from step to step, and positions are those of its rows.
    `limit`, `cos_sin_PD`: as of `RotaryTable`, of a CPU."""

    def __init__(self, config: RotaryConfig, *, limit: int, dtype: torch.dtype) -> None:
        self._positions = RotaryTable(config, limit=limit, dtype=dtype, device=torch.device("cpu"))
        self._axis_of_column = _axis_of_column(config)
        self.cos_sin_PD = torch.zeros(0, len(self._axis_of_column), dtype=dtype)

    def fill(self, positions_AT: torch.Tensor) -> torch.Tensor:
        """`positions_AT`: int64 [3, T], or [1, T] if they are equal on all axes. Returns the rows
        [T] of their angles."""
        num_tokens = positions_AT.shape[1]
        self._positions.cover(int(positions_AT.max()) + 1)
        if num_tokens > len(self.cos_sin_PD):
            self.cos_sin_PD.resize_(1 << (num_tokens - 1).bit_length(), len(self._axis_of_column))
        rows_PD, out_TD = self._positions.cos_sin_PD, self.cos_sin_PD[:num_tokens]
        if len(positions_AT) == 1:
            torch.index_select(rows_PD, 0, positions_AT[0], out=out_TD)
        else:
            index_TD = positions_AT[self._axis_of_column].T
            torch.gather(rows_PD, 0, index_TD, out=out_TD)
        return torch.arange(num_tokens)


def rotary_rows(config: RotaryConfig, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """cos_sin_PD of the positions [start, stop): cosines then sines, computed in float32."""
    frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(start, stop, dtype=torch.float32).unsqueeze(1) * frequencies
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
