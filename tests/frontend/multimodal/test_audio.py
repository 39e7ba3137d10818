"""Sounds against transformers' feature extractor and processor, and against sines."""

import io
import struct
import wave
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Qwen2AudioProcessor,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRProcessor,
    WhisperFeatureExtractor,
)

from frontend.errors import InvalidInput
from frontend.multimodal.audio import MAX_SECONDS, LogMel, load_audio, resampled
from frontend.multimodal.media import MediaItem
from tests.frontend.multimodal import models
from tests.profiles import examples

QWEN3_ASR_TEMPLATE = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content[0].text }}"
    "{% endfor %}<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>"
    "<|im_end|>\n<|im_start|>assistant\n{{ messages[-1].content[0].text }}<|im_end|>\n"
)
"""What the published one writes of a context, a sound and an answer."""


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
            array = tensors_of(ours, index)[name]
            assert array.dtype == theirs[name].dtype
            np.testing.assert_allclose(array[0], theirs[name][index], rtol=0, atol=atol)


def tensors_of(made, which):
    """Arrays by name of the input of this number."""
    return {
        name: np.frombuffer(made.frames[ref.frame], ref.dtype).reshape(ref.shape)
        for name, ref in made.inputs[which].tensors.items()
    }


def noise(seconds, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(int(seconds * 16_000)).astype(np.float32)


def test_voxtral_hears_windows_with_silence_behind_the_last():
    """As its processor, which needs packages for that: windows of the features of the whole."""
    extractor = WhisperFeatureExtractor(feature_size=128)
    case = models.Case("voxtral", SimpleNamespace(feature_extractor=extractor))
    sounds = [noise(30.01), noise(2.3, seed=1)]
    items = [MediaItem("audio", (sound, 16_000), "a") for sound in sounds]
    made = case.ours().process("[INST][AUDIO]a[AUDIO]b", items, add_special_tokens=False)
    begin, token = models.id_of("[BEGIN_AUDIO]"), models.id_of("[AUDIO]")
    rows = [each for each in made.token_ids if each in (begin, token)]
    assert rows == [begin, *[token] * 750, begin, *[token] * 375]
    assert [each.stop - each.start for each in made.inputs] == [750, 375]
    for index, sound in enumerate(sounds):
        theirs = extractor(
            sound, sampling_rate=16_000, padding=True, truncation=False, pad_to_multiple_of=480_000,
            return_tensors="np",
        )["input_features"]  # fmt: skip
        theirs = theirs.reshape(128, -1, 3000).transpose(1, 0, 2)
        (ours,) = tensors_of(made, index).values()
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("seconds", [0.2, 1, 3.2173, 11.05])
def test_qwen3_asr_gets_features_mask_and_tokens(seconds):
    tokenizer = models.their_tokenizer(
        audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    tokenizer.pad_token = "<|audio_eos|>"
    case = models.Case("qwen3_asr", Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), tokenizer))
    prompt, sound = "a <|audio_start|><|audio_pad|><|audio_end|>b", noise(seconds)
    items = [MediaItem("audio", (sound, 16_000), "a")]
    made = case.ours().process(prompt, items, add_special_tokens=False)
    theirs = case.processor(text=[prompt], audio=[sound], sampling_rate=16_000)
    assert made.token_ids == theirs["input_ids"][0].tolist()
    ours = tensors_of(made, 0)
    for name in ("input_features", "input_features_mask"):
        expected = theirs[name].numpy()
        assert (ours[name].shape, ours[name].dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5)


def test_qwen3_asr_is_asked_and_understood_as_its_processor_does():
    tokenizer = models.their_tokenizer(
        audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    theirs = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), tokenizer, QWEN3_ASR_TEMPLATE)
    ours = models.Case("qwen3_asr", theirs).ours().transcriber()
    for language, context in ((None, None), ("en", "Names: Ada."), ("Chinese", None)):
        (expected,) = theirs.apply_transcription_request(
            [noise(0.1)], language=language, prompt=context, tokenize=False
        )
        assert ours.transcript_prompt(language, context) == expected
    with pytest.raises(InvalidInput, match="language is 'xx', the model knows ar, yue, zh"):
        ours.transcript_prompt("xx", None)
    repeats = ["ha" * 19, "ha" * 20, "ha" * 45 + "!", "a" * 20, "a" * 21, "ab" * 25 + "cde" * 30]
    heads = ["language English<asr_text>", "language None<asr_text>", "", " <asr_text>", "Klingon"]
    for head in [*heads, "language English\nx<asr_text>", "Klingon<asr_text>"]:
        for said in ["", " a word. ", *repeats, *("z" + each + " " + each for each in repeats)]:
            expected = theirs.parse_output(head + said)
            code = {"English": "en"}.get(expected["language"], expected["language"])
            assert ours.transcript_of(head + said) == (code, expected["transcription"])


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
