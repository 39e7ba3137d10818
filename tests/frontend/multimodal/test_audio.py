"""Sounds against transformers' feature extractor and processor, and against sines."""

import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from frontend.errors import InvalidInput
from frontend.multimodal.audio import MAX_SECONDS, LogMel, load_audio, resampled
from frontend.multimodal.media import MediaItem
from tests.frontend.multimodal import models
from tests.profiles import examples


def speech(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise in bursts over a hum: as loud and as quiet as speech."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * 16_000)) / 16_000
    bursts = np.maximum(0, np.sin(2 * np.pi * 1.7 * times)) * rng.standard_normal(len(times))
    return (0.2 * bursts + 0.05 * np.sin(2 * np.pi * 160 * times)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    whole = np.round(np.clip(samples, -1, 1 - 2.0 ** (1 - 8 * width)) * 2 ** (8 * width - 1))
    whole = whole.astype(np.int64) + (128 if width == 1 else 0)
    frames = b"".join(struct.pack("<q", int(value))[:width] for value in whole)
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((channels, width, rate, 0, "NONE", ""))
        opened.writeframes(frames)
    return file.getvalue()


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 1.3, 30, 31])
def test_features_are_those_of_whisper(bins, seconds):
    """Of transformers' own formulas in numpy for any sound; of those in torch, whose float32 loses
    digits where a sound is quiet, for one that is not."""
    theirs = WhisperFeatureExtractor(feature_size=bins)
    samples = speech(seconds)
    padded = np.zeros((1, theirs.n_samples), np.float32)
    padded[0, : len(samples)] = samples[: theirs.n_samples]
    ours = LogMel(feature_size=bins).features(samples)
    np.testing.assert_allclose(ours, theirs._np_extract_fbank_features(padded, "cpu"), atol=1e-6)
    noise = np.random.default_rng(1).standard_normal(len(samples)).astype(np.float32)
    given = theirs(noise, sampling_rate=16_000, return_tensors="np")["input_features"]
    ours = LogMel(feature_size=bins).features(noise)
    assert ours.shape == given.shape
    assert ours.dtype == given.dtype == np.float32
    np.testing.assert_allclose(ours, given, atol=1e-5)


def test_qwen2_audio_gets_features_mask_and_tokens():
    extractor = WhisperFeatureExtractor(feature_size=128)
    tokenizer = models.their_tokenizer(audio_token="<|AUDIO|>")
    case = models.Case("qwen2_audio", Qwen2AudioProcessor(extractor, tokenizer))
    sounds = [speech(0.5), speech(2.01, seed=1)]
    prompt = "a <|audio_bos|><|AUDIO|><|audio_eos|>b<|AUDIO|>"
    items = [MediaItem("audio", (sounds[0], 16_000), "a"), MediaItem("audio", wav(sounds[1]), "b")]
    ours = case.ours().process(prompt, items, add_special_tokens=True)
    sounds[1] = load_audio(wav(sounds[1]), "b")
    theirs = case.processor(text=[prompt], audio=sounds, sampling_rate=16_000, return_tensors="np")
    assert ours.token_ids == theirs["input_ids"][0].tolist()
    for index, each in enumerate(ours.inputs):
        assert ours.token_ids[each.start : each.stop] == [models.id_of("<|AUDIO|>")] * (
            each.stop - each.start
        )
        for name, atol in (("input_features", 3e-5), ("feature_attention_mask", 0)):
            ref = each.tensors[name]
            array = np.frombuffer(ours.frames[ref.frame], ref.dtype).reshape(ref.shape)
            assert array.dtype == theirs[name].dtype
            np.testing.assert_allclose(array[0], theirs[name][index], rtol=0, atol=atol)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width_and_of_two_channels(width):
    left, right = speech(0.05), speech(0.05, seed=1)
    both = np.stack([left, right], axis=1).reshape(-1)
    found = load_audio(wav(both, width=width, channels=2), "sound")
    np.testing.assert_allclose(found, (left + right) / 2, atol=2.0 ** (1 - 8 * min(width, 3)))


@given(
    rate=st.sampled_from([8000, 11_025, 12_000, 22_050, 24_000, 44_100, 48_000, 96_000]),
    share=st.floats(0.003, 0.35),
)
@settings(max_examples=examples(20), deadline=None)
def test_a_sine_at_another_rate_is_the_same_sine(rate, share):
    hertz = round(share * min(rate, 16_000))
    sine = lambda rate: np.sin(2 * np.pi * hertz * np.arange(rate) / rate).astype(np.float32)  # noqa: E731
    found = resampled(sine(rate), rate, 16_000)
    assert found.shape == (16_000,)
    np.testing.assert_allclose(found[400:-400], sine(16_000)[400:-400], atol=2e-4)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "is no WAV file"),
        (b"ID3" + bytes(100), "is no WAV file of whole numbers .*send one, or install soundfile"),
        (wav(np.zeros(10))[:30], "is no WAV file"),
        (wav(np.zeros(0)), "0 samples at 16000 Hz"),
        (wav(np.zeros(4000), rate=1), f"which is 4e.03 s, the limit is {MAX_SECONDS}"),
        (wav(np.zeros(400), rate=15_991), "15991 Hz is not brought to 16000 Hz"),
        ((np.full(16, np.nan, np.float32), 16_000), "no numbers"),
        ((np.zeros(16, np.int16), 16_000), "type int16; give floats"),
        ((np.zeros((2, 2, 2)), 16_000), "shape"),
        ((np.zeros(16), 0), "0 Hz"),
        ("x", "is str"),
    ],
)
def test_what_is_no_sound_is_refused(source, words):
    with pytest.raises(InvalidInput, match=words):
        load_audio(source, "sound")
