"""Encoder-decoder models through client and daemon against transformers' `generate`.

Proves S144 from the client's prompt to the answer's tokens."""

import io
import sys
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from daemons import run_to_exit, running_daemon, slow_program
from raw_client import RawClient

from frontend import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from frontend.errors import InvalidInput
from tests.frontend.http.http_server import serving

sys.path.append(str(Path(__file__).parents[1] / "engine_core" / "models"))
from encoder_decoder_folders import encoder_input, make_plain_bart

pytestmark = pytest.mark.slow

LENGTHS = (1, 9, 37, 60, 16, 120)
"""Of encoder inputs."""
PENALTY = 1.3
"""So that answers of random models are not one token again and again."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=PENALTY)


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    return make_plain_bart(tmp_path_factory.mktemp("tiny-bart"))


def text_prompt(length):
    return {"encoder_prompt": encoder_input("bart", length)["input_ids"].tolist()}


def generated(model, tensors, **options):
    """New tokens of transformers, the decoder's start aside."""
    batch = {name: tensor[None] for name, tensor in tensors.items()}
    found = model.generate(
        **batch, max_new_tokens=20, do_sample=False, repetition_penalty=PENALTY, **options
    )
    return [each.tolist()[1:] for each in found]


@pytest.fixture(scope="module")
def expected(bart):
    _, model = bart
    return [generated(model, encoder_input("bart", n), num_beams=1)[0] for n in LENGTHS]


@pytest.fixture(scope="module")
def small(bart):
    """A daemon whose requests are preempted: an encoder of 120 tokens takes 8 of 14 blocks."""
    folder, _ = bart
    options = ("--num-blocks", 14, "--max-model-len", 48, "--watermark", 0)
    with running_daemon(folder, "--max-num-batched-tokens", 16, *options) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def llm(small):
    with LLM(address=small.address) as client:
        yield client


def test_tokens_are_those_of_transformers_one_by_one_and_in_a_crowd(llm, expected):
    prompts = [text_prompt(length) for length in LENGTHS]
    for answers in (llm.generate(prompts, GREEDY), llm.generate(prompts[::-1] * 3, GREEDY)):
        for answer in answers:
            length = answer_length(answer, answers, prompts)
            assert answer.outputs[0].token_ids == expected[LENGTHS.index(length)]
            assert answer.prompt_token_ids == [2]


def answer_length(answer, answers, prompts):
    place = answers.index(answer)
    return LENGTHS[place] if len(answers) == len(prompts) else LENGTHS[::-1][place % len(LENGTHS)]


def test_samples_and_beams_share_their_encoders_blocks(small, llm, bart):
    """And all blocks are free behind them."""
    _, model = bart
    params = SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=20, ignore_eos=True)
    (three,) = llm.generate(text_prompt(37), params)
    alone = llm.generate(
        [text_prompt(37)] * 3,
        [
            SamplingParams(temperature=0.8, seed=4 + n, max_tokens=20, ignore_eos=True)
            for n in range(3)
        ],
    )
    assert [each.token_ids for each in three.outputs] == [
        each.outputs[0].token_ids for each in alone
    ]
    assert len({tuple(each.token_ids) for each in three.outputs}) == 3
    (beams,) = llm.beam_search([text_prompt(9)], BeamSearchParams(beam_width=2, max_tokens=8))
    batch = {name: tensor[None] for name, tensor in encoder_input("bart", 9).items()}
    found = model.generate(
        **batch, max_new_tokens=8, num_beams=2, do_sample=False, forced_eos_token_id=None
    )
    assert beams.sequences[0].tokens[1:] == found[0].tolist()[1:]
    with RawClient(small.address) as client:
        assert client.statistics().num_blocks_in_use == 0


def test_the_decoder_goes_on_from_a_prompt_of_its_own(llm, expected):
    tokens = expected[2]
    prompt = {**text_prompt(37), "decoder_prompt": {"prompt_token_ids": [2, *tokens[:5]]}}
    params = SamplingParams(temperature=0.0, max_tokens=15, repetition_penalty=PENALTY)
    (answer,) = llm.generate(prompt, params)
    assert answer.outputs[0].token_ids == tokens[5:]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"encoder_prompt": []}, "encoder_prompt has 0 tokens, .* takes from 1 to 160"),
        ({"encoder_prompt": [3] * 161}, "has 161 tokens"),
        ({"encoder_prompt": [131]}, "tokens from 131 to 131, the vocabulary ends at 130"),
        ({"encoder_prompt": [3], "x": 1}, "'x' beside 'encoder_prompt'"),
        ({"encoder_prompt": {"multi_modal_data": {"audio": b""}}}, "takes text only"),
    ],
)
def test_what_the_encoder_cannot_take_is_refused_by_name(llm, prompt, message):
    with pytest.raises(InvalidInput, match=message):
        llm.generate(prompt, GREEDY)


async def test_a_stream_goes_on_with_its_input_after_the_daemons_death(bart, expected):
    with running_daemon(bart[0], program=slow_program(0.03)) as daemon:
        async with await AsyncLLM.connect(daemon.address) as client:
            tokens = []
            async for output in client.generate(text_prompt(60), GREEDY, "r"):
                if not tokens:
                    daemon.kill()
                    daemon.start()
                tokens = output.outputs[0].token_ids
    assert tokens == expected[3]


def test_options_without_effect_are_refused_by_name(bart):
    ended = run_to_exit("--model", bart[0], "--host-cache-memory", "1MB")
    assert "--host-cache-memory is not supported for Bart" in ended.stderr


# ---------------------------------------------------------------------- sounds


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A tiny Whisper of windows of a second, as it would be published."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"]
    marks += ["<|transcribe|>", "<|startofprev|>", "<|notimestamps|>"]
    marks += [f"<|{time / 50:.2f}|>" for time in range(51)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks[:8])
    backend.add_tokens(marks[8:])
    ids = {mark: backend.token_to_id(mark) for mark in marks}
    torch.manual_seed(1)
    config = transformers.WhisperConfig(
        vocab_size=backend.get_vocab_size(), d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=6, encoder_ffn_dim=50,
        decoder_ffn_dim=70, max_source_positions=50, max_target_positions=64, num_mel_bins=20,
        init_std=0.4, decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"], begin_suppress_tokens=[5, ids["<|endoftext|>"]],
        suppress_tokens=[7, 9],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny-whisper")
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(path)
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    extractor.save_pretrained(path)
    return path, model, extractor, tokenizer, ids


def sound(seconds, seed=0):
    """Bytes of a WAV file, and its samples as whole numbers leave them."""
    draw = np.random.default_rng(seed)
    at = np.arange(int(16_000 * seconds)) / 16_000
    samples = 0.4 * np.sin(2 * np.pi * draw.uniform(100, 900) * at) * draw.uniform(0, 1, len(at))
    whole = (samples * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(whole.tobytes())
    return file.getvalue(), whole.astype(np.float32) / 32768


def heard(whisper, samples, names, count):
    """New tokens of transformers behind this start."""
    _, model, extractor, _, ids = whisper
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    start = torch.tensor([[ids[name] for name in names]])
    with torch.no_grad():
        found = transformers_generate(model, features, start, count)
    return found[start.shape[1] :]


def transformers_generate(model, features, start, count):
    """`GenerationMixin.generate`: Whisper's own adds rules of its task tokens."""
    from transformers import GenerationMixin

    found = GenerationMixin.generate(
        model, features, decoder_input_ids=start, max_new_tokens=count, do_sample=False
    )
    return found[0].tolist()


@pytest.fixture(scope="module")
def server(whisper):
    with running_daemon(whisper[0]) as daemon, serving(daemon.address) as url:
        yield url


def transcribe(url, data, path="transcriptions", **fields):
    return httpx.post(
        f"{url}/v1/audio/{path}", files={"file": ("a.wav", data)}, data=fields, timeout=60
    )


def test_a_transcription_is_what_transformers_hears(server, whisper):
    data, samples = sound(0.8)
    start = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    tokens = heard(whisper, samples, start, 30)
    answer = transcribe(server, data, language="de", max_completion_tokens=30, model="")
    assert answer.status_code == 200, answer.text
    spoken = [token for token in tokens if token < whisper[4]["<|0.00|>"]]
    assert answer.json()["text"] == whisper[3].decode(spoken, skip_special_tokens=True).strip()
    assert answer.json()["usage"] == {"type": "duration", "seconds": 1}


def test_the_language_is_the_likeliest_one(server, whisper):
    _, model, extractor, _, ids = whisper
    data, samples = sound(0.7, seed=3)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    start = torch.tensor([[ids["<|startoftranscript|>"]]])
    with torch.no_grad():
        logits_V = model(features, decoder_input_ids=start).logits[0, -1]
    best = max(("en", "de"), key=lambda name: logits_V[ids[f"<|{name}|>"]])
    body = transcribe(server, data, response_format="verbose_json").json()
    assert body["language"] == best
    assert body["duration"] == 0.7


def test_a_long_sound_is_heard_in_windows_and_told_in_every_format(server):
    data, _ = sound(3.3)
    answer = transcribe(server, data, response_format="verbose_json", language="en")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    starts = [segment["start"] for segment in body["segments"]]
    assert starts == sorted(starts)
    assert body["segments"][-1]["end"] <= body["duration"] == 3.3
    assert len({int(start) for start in starts}) >= 2, "more than one window"
    subtitles = transcribe(server, data, response_format="srt", language="en").text
    assert subtitles.startswith("1\n00:00:0")
    assert subtitles.count(" --> ") == len(body["segments"])
    assert transcribe(server, data, response_format="vtt", language="en").text[:8] == "WEBVTT\n\n"
    assert transcribe(server, data, "translations", response_format="text").status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "xx"}, "language is 'xx', the model knows de, en"),
        ({"nonsense": "1"}, "nonsense"),
        ({"stream": "true"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "word"),
    ],
)
def test_a_form_that_cannot_be_served_is_refused_by_name(server, fields, message):
    answer = transcribe(server, sound(0.2)[0], **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\0" * 1000])
def test_what_is_no_sound_is_refused(server, data):
    answer = transcribe(server, data)
    assert answer.status_code == 400
    assert "file" in answer.json()["error"]["message"]


def test_a_model_of_text_does_not_transcribe(small):
    with serving(small.address) as url:
        answer = transcribe(url, sound(0.2)[0])
        assert answer.status_code == 400
        assert "does not transcribe" in answer.json()["error"]["message"]
