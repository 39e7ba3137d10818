"""Foreign sound files to samples, and samples to Whisper's log-mel features: as transformers'
`WhisperFeatureExtractor` makes them in numpy."""

import io
import math
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from frontend.errors import InvalidInput
from frontend.multimodal.media_process import decoded

Floats = npt.NDArray[np.float32]

MAX_SECONDS = 3600
_MAX_KERNEL = 2**22
"""Numbers of a filter between two rates: those of rates in use have less."""
_FILTER_WIDTH, _ROLL_OFF = 24, 0.99
"""Zero crossings of the filter to each side, and its cut-off."""
_BLOCK = 2**15
"""Frames at a time, so that memory does not grow with the sound's length."""


def load_audio(source: object, name: str, rate: int = 16_000) -> Floats:
    """One channel of samples in [-1, 1] at `rate`, the mean of those that there are.

    Args:
        source: the bytes of a WAV file (or of what soundfile reads, if it is installed), samples,
            or (samples, their rate) as vLLM has it; samples are [n] or [channels, n].
        name: for errors.

    Raises:
        InvalidInput: no sound, of another format, broken, or too long.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return np.frombuffer(decoded("audio", name, source, rate), np.float32)
    samples, given_rate = source if isinstance(source, tuple | list) else (source, rate)
    if not isinstance(samples, np.ndarray) or not isinstance(given_rate, int | float):
        raise InvalidInput(
            f"{name} is {type(samples).__name__}; give the bytes of a file, a path, or samples "
            "and their rate"
        )
    if samples.ndim == 2:
        samples = samples.mean(axis=0)
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
        raise InvalidInput(
            f"{name} has samples of shape {samples.shape} and type {samples.dtype}; give "
            "floats from -1 to 1, [n] or [channels, n]"
        )
    seconds = len(samples) / given_rate if given_rate > 0 else 0
    if not 0 < seconds <= MAX_SECONDS or given_rate != int(given_rate):
        raise InvalidInput(
            f"{name} has {len(samples)} samples at {given_rate} Hz, which is {seconds:.3g} s, the "
            f"limit is {MAX_SECONDS} s; send a part of it"
        )
    if not np.isfinite(samples).all():
        raise InvalidInput(f"{name} has samples that are no numbers; send a sound")
    return resampled(samples.astype(np.float32), int(given_rate), rate)


def decode_audio(data: bytes, name: str, rate: int) -> bytes:
    """What `load_audio` gets of a file's bytes. Raises InvalidInput: see there."""
    return load_audio(_read(data, name), name, rate).tobytes()


def _read(data: bytes, name: str) -> tuple[Floats, int]:
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            frames = file.readframes(file.getnframes())
            return _mono(_pcm(frames, width).reshape(-1, channels)), file.getframerate()
    except (wave.Error, EOFError, ValueError) as error:
        try:
            import soundfile
        except ImportError:
            raise InvalidInput(
                f"{name} is no WAV file of whole numbers ({error}); send one, or install soundfile "
                "for other formats"
            ) from None
        try:
            found, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        except RuntimeError as unknown:
            raise InvalidInput(f"{name} is no sound ({unknown}); send a WAV file") from None
        return _mono(found), rate


def _mono(samples: npt.NDArray[Any]) -> Floats:
    mean: Floats = samples.mean(axis=1, dtype=np.float32)
    return mean


def _pcm(frames: bytes, width: int) -> npt.NDArray[np.float32]:
    """Little-endian whole numbers to [-1, 1); those of one byte are unsigned."""
    samples = np.zeros((len(frames) // width, 4), np.uint8)
    samples[:, 4 - width :] = np.frombuffer(frames, np.uint8).reshape(-1, width)
    if width == 1:
        samples[:, 3] ^= 128
    whole = samples.view("<i4")[:, 0]
    return whole.astype(np.float32) / np.float32(2**31)


def resampled(samples: Floats, rate: int, new_rate: int) -> Floats:
    """By a sinc filter under a Hann window: the formula of `torchaudio.functional.resample`, whose
    default is a quarter as long.
    Raises InvalidInput: rates without a common divisor that is worth it."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    width = math.ceil(_FILTER_WIDTH * old / (min(old, new) * _ROLL_OFF))
    if new * (2 * width + old) > _MAX_KERNEL:
        raise InvalidInput(
            f"a sound at {rate} Hz is not brought to {new_rate} Hz here; send it at {new_rate} Hz"
        )
    kernel = _filter(old, new, width)
    padded = np.pad(samples, (width, width + old))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + old)[::old]
    blocks = [windows[start : start + _BLOCK] @ kernel for start in range(0, len(windows), _BLOCK)]
    found: Floats = np.concatenate(blocks).reshape(-1)
    return found[: math.ceil(new * len(samples) / old)]


@lru_cache(maxsize=4)
def _filter(old: int, new: int, width: int) -> Floats:
    """[2 * width + old, new]: what each sample of a window adds to each new one."""
    cut_off = min(old, new) * _ROLL_OFF
    times = np.arange(-width, width + old)[:, None] / old - np.arange(new)[None] / new
    times = np.clip(times * cut_off, -_FILTER_WIDTH, _FILTER_WIDTH)
    window = np.cos(times * np.pi / _FILTER_WIDTH / 2) ** 2
    kernel: Floats = (np.sinc(times) * window * cut_off / old).astype(np.float32)
    return kernel


def quietest(samples: Floats, size: int) -> int:
    """The middle of the part of `size` samples with the least energy."""
    energy = np.cumsum(np.concatenate([[0.0], np.square(samples, dtype=np.float64)]))
    size = max(1, min(size, len(samples)))
    return int(np.argmin(energy[size:] - energy[:-size])) + size // 2 or 1


@dataclass(frozen=True)
class LogMel:
    """Whisper's features of a window: `feature_size` mel bins of frames, 100 a second."""

    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    chunk_length: int = 30
    """Seconds of a window."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "LogMel":
        """Of a preprocessor_config.json. Raises InvalidInput: it asks for what is not done."""
        settings = {**settings, **(settings.get("feature_extractor") or {})}
        if settings.get("dither"):
            raise InvalidInput(
                f"the model's feature extractor has dither {settings['dither']}, which this engine "
                "does not do; set it to 0"
            )
        names = LogMel.__dataclass_fields__
        return LogMel(**{name: settings[name] for name in names if name in settings})

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.chunk_length * self.sampling_rate

    def num_frames(self, num_samples: int) -> int:
        """Frames that hold so many samples."""
        return -(-num_samples // self.hop_length)

    def features(self, samples: Floats) -> Floats:
        """[1, mel bins, frames] of one window: silence is behind what is shorter, what is longer
        is cut."""
        return self.windows(samples[: self.num_samples])

    def windows(self, samples: Floats) -> Floats:
        """[windows, mel bins, frames] of a sound and the silence behind it in the last window."""
        number = max(1, -(-len(samples) // self.num_samples))
        padded = np.pad(samples, (0, number * self.num_samples - len(samples)))
        log_mel = self.log_mel(padded).reshape(self.feature_size, number, -1)
        return np.ascontiguousarray(log_mel.transpose(1, 0, 2))

    def log_mel(self, samples: Floats) -> Floats:
        """[mel bins, len(samples) // hop_length]: nothing is 80 dB below the loudest of all."""
        padded = np.pad(samples, self.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        frames, window = frames[:-1], np.hanning(self.n_fft + 1)[:-1]
        found = np.empty((self.feature_size, len(frames)), np.float32)
        for start in range(0, len(frames), _BLOCK // 8):
            some = slice(start, start + _BLOCK // 8)
            spectrum = np.fft.rfft(frames[some].astype(np.float64) * window)
            power = np.abs(spectrum.astype(np.complex64), dtype=np.float64) ** 2
            found[:, some] = np.log10(np.maximum(1e-10, self._filters.T @ power.T))
        bounded: Floats = np.maximum(found, found.max() - np.float32(8))
        return (bounded + np.float32(4)) / np.float32(4)

    @cached_property
    def _filters(self) -> npt.NDArray[np.float64]:
        """[frequencies, mel bins], Slaney's scale and areas, up to 8 kHz."""
        # 200/3 Hz a mel up to 1 kHz, then 27 mels for each factor of 6.4
        highest = 15 + np.log(8.0) * 27 / np.log(6.4)
        mels = np.linspace(0, highest, self.feature_size + 2)
        linear, steps = 200 * mels / 3, np.exp(np.log(6.4) / 27 * (mels - 15))
        edges = np.where(mels >= 15, 1000 * steps, linear)
        bins = np.linspace(0, self.sampling_rate // 2, 1 + self.n_fft // 2)
        slopes = edges[None] - bins[:, None]
        widths = np.diff(edges)
        triangles = np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:])
        return np.maximum(0, triangles) * (2 / (edges[2:] - edges[:-2]))
