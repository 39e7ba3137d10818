"""Sounds for decoders through client and daemon, against transformers' `generate`.

Proves S021 for sounds, from the client's samples to the answer's tokens."""

import io
import sys
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from daemons import running_daemon

from frontend import LLM, SamplingParams
from tests.frontend.http.http_server import serving

sys.path.append(str(Path(__file__).parents[1] / "frontend" / "multimodal"))

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEMPLATE = (
    "<s>{% for m in messages %}[INST]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'input_audio' %}[AUDIO]{% endif %}{% endfor %}[/INST]{% endfor %}"
)


def make_folder(model_type, path, **audio):
    """A tiny model as it would be published. Its windows are of 30 s, as those of large ones."""
    from models import BACKEND, CONFIGS, their_tokenizer
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from tests.engine_core.models.tiny_multimodal import CONFIGS as TINY

    torch.manual_seed(0)
    given = TINY[model_type]
    text = given["text_config"] | {
        "vocab_size": BACKEND.get_vocab_size(), "max_position_embeddings": 4096,
    }  # fmt: skip
    sound = given["audio_config"] | {"num_mel_bins": 20, "max_source_positions": 1500}
    config = AutoConfig.for_model(
        model_type, text_config=text, audio_config=sound,
        audio_token_id=CONFIGS[model_type]["audio_token_id"],
    )  # fmt: skip
    AutoModelForMultimodalLM.from_config(config).save_pretrained(path)
    tokenizer = their_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory):
    folder = make_folder("voxtral", tmp_path_factory.mktemp("tiny-voxtral"))
    extractor("WhisperFeatureExtractor").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def voxtral_daemon(voxtral):
    with running_daemon(voxtral, "--max-num-batched-tokens", 300) as daemon:
        yield daemon


def extractor(name):
    import transformers

    return getattr(transformers, name)(feature_size=20)


def noise(seconds, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(int(seconds * 16_000)).astype(np.float32) / 8


def generated(folder, text, sounds, pad):
    """Tokens of transformers. `sounds`: features of each, [windows, bins, frames]."""
    from models import BACKEND
    from transformers import AutoModelForMultimodalLM

    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([BACKEND.encode(text, add_special_tokens=False).ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **sounds, do_sample=False,
            max_new_tokens=12, min_new_tokens=12, pad_token_id=pad,
        )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def windows(sounds):
    parts = []
    for sound in sounds:
        found = extractor("WhisperFeatureExtractor")(
            sound, sampling_rate=16_000, padding=True, truncation=False,
            pad_to_multiple_of=480_000, return_tensors="pt",
        ).input_features  # fmt: skip
        parts.append(found.reshape(20, -1, 3000).transpose(0, 1))
    return {"input_features": torch.cat(parts)}


def test_answers_about_sounds_are_those_of_transformers(voxtral, voxtral_daemon):
    short, long = noise(2.5, 0), noise(31, 1)
    chats = [(short, "what is it?"), (long, "compare", short, "?"), (short, "what then?")]
    texts = [
        "[BEGIN_AUDIO]" + "[AUDIO]" * 375 + "what is it?",
        "[BEGIN_AUDIO]" + "[AUDIO]" * 750 + "compare" + "[BEGIN_AUDIO]" + "[AUDIO]" * 375 + "?",
        "[BEGIN_AUDIO]" + "[AUDIO]" * 375 + "what then?",
    ]
    with LLM(address=voxtral_daemon.address) as llm:
        for parts, text in zip(chats, texts, strict=True):
            content = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "audio", "audio": (part, 16_000)}
                for part in parts
            ]
            answer = llm.chat([{"role": "user", "content": content}], GREEDY)[0]
            sounds = windows([part for part in parts if not isinstance(part, str)])
            expected = generated(voxtral, f"<s>[INST]{text}[/INST]", sounds, 0)
            assert answer.outputs[0].token_ids == expected
        assert answer.num_cached_tokens >= 368  # the sound's, of the first
        assert llm.statistics().num_encoder_inputs == 2


def transcribe(client, sound, **fields):
    whole = np.clip(np.round(sound * 32768), -32768, 32767).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(whole.tobytes())
    found = client.post(
        "/v1/audio/transcriptions",
        data={"max_completion_tokens": 12, **fields},
        files={"file": ("speech.wav", buffer.getvalue(), "audio/wav")},
    )
    return found, whole.astype(np.float32) / 32768


def test_voxtral_transcribes_by_its_own_prompt(voxtral, voxtral_daemon):
    with (
        serving(voxtral_daemon.address) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        found, samples = transcribe(
            client, noise(40, 2), language="en", response_format="verbose_json"
        )
        assert found.status_code == 200, found.text
        prompt = "<s>[INST][BEGIN_AUDIO]" + "[AUDIO]" * 750 + "[/INST]lang:en[TRANSCRIBE]"
        (segment,) = found.json()["segments"]
        assert segment["tokens"] == generated(voxtral, prompt, windows([samples]), 0)
        assert (segment["start"], segment["end"], found.json()["language"]) == (0, 40, "en")
        for fields, what in (
            ({"response_format": "srt"}, "the model gives no times"),
            ({"language": "english"}, "language is 'english'; give a code"),
            ({"prompt": "Ada"}, "this model takes none here"),
        ):
            refused, _ = transcribe(client, noise(1, 3), **fields)
            assert refused.status_code == 400 and what in refused.text


def test_qwen3_asr_transcribes_by_its_own_prompt(tmp_path):
    folder = make_folder("qwen3_asr", tmp_path)
    extractor("Qwen3ASRFeatureExtractor").save_pretrained(folder)
    with (
        running_daemon(folder) as daemon,
        serving(daemon.address) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        found, samples = transcribe(
            client, noise(3.21, 4), prompt="Ada", language="de", response_format="verbose_json"
        )
    assert found.status_code == 200, found.text
    made = extractor("Qwen3ASRFeatureExtractor")(
        samples, sampling_rate=16_000, padding=True, return_attention_mask=True
    )
    sounds = {
        "input_features": made["input_features"], "input_features_mask": made["attention_mask"],
    }  # fmt: skip
    prompt = (
        "<|im_start|>system\nAda<|im_end|>\n<|im_start|>user\n<|audio_start|>"
        f"{'<|audio_pad|>' * 42}<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
        "language German<asr_text>"
    )
    (segment,) = found.json()["segments"]
    assert segment["tokens"] == generated(folder, prompt, sounds, 0)
    assert found.json()["language"] == "de"
