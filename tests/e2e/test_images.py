"""A chat with images through client and daemon, against transformers' `generate`.

Proves S021, S221 from the client's picture to the answer's tokens."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from daemons import running_daemon
from PIL import Image

from frontend import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "frontend" / "multimodal"))

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2.5-VL, as it would be published."""
    from models import BACKEND, id_of, their_tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    from tests.engine_core.models.tiny_multimodal import CONFIGS

    torch.manual_seed(0)
    given = CONFIGS["qwen2_5_vl"]
    text = given["text_config"] | {
        "vocab_size": BACKEND.get_vocab_size(), "max_position_embeddings": 512,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=given["vision_config"],
        image_token_id=id_of("<|image_pad|>"), video_token_id=id_of("<|AUDIO|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny-qwen-vl")
    AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    tokenizer = their_tokenizer(image_token="<|image_pad|>", video_token="<|AUDIO|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def daemon(folder):
    with running_daemon(folder, "--max-num-batched-tokens", 32) as daemon:
        yield daemon


@pytest.fixture
def gguf_folder(folder, tmp_path):
    """The same model as llama.cpp's two files."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from tests.engine_core.model_files.conftest import write_in
    from tests.engine_core.model_files.converted_tower import text_file, tower_file

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    numbers = range(model.config.text_config.vocab_size)
    tokens = [tokenizer.convert_ids_to_tokens(number) or f"t{number}" for number in numbers]
    write_in(tmp_path, *text_file(model, tokens), name="tiny.gguf")
    keys, tensors = tower_file(model)
    sizes = {"image_min_pixels": 64, "image_max_pixels": 4096}
    keys |= {f"clip.vision.{key}": value for key, value in sizes.items()}
    keys |= {
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    write_in(tmp_path, keys, tensors, name="mmproj-tiny-f32.gguf")
    return tmp_path


def picture(seed, size):
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8))


def conversation(*parts):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_pil", "image_pil": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def theirs(folder, parts):
    """Tokens of transformers' own processor and `generate`."""
    from models import qwen2_5_vl
    from transformers import AutoModelForImageTextToText

    processor = qwen2_5_vl(patch_size=4, min_pixels=64, max_pixels=4096).processor
    text = "".join(
        part if isinstance(part, str) else "<|vision_start|><|image_pad|><|vision_end|>"
        for part in parts
    )
    images = [part for part in parts if not isinstance(part, str)]
    made = processor(text=f"user:{text};assistant:", images=images, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    made = {name: value for name, value in made.items() if name != "token_type_ids"}
    with torch.inference_mode():
        out = model.generate(**made, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    return out[0, made["input_ids"].shape[1] :].tolist()


def test_answers_about_images_are_those_of_transformers(folder, daemon):
    chats = [
        ["what is ", picture(0, (40, 30)), "?"],
        [picture(1, (16, 64)), picture(2, (50, 50)), " compare"],
        ["only text"],
        ["what is ", picture(0, (40, 30)), " then?"],
    ]
    with LLM(address=daemon.address) as llm:
        answers = llm.chat([conversation(*parts) for parts in chats], GREEDY)
        for parts, answer in zip(chats, answers, strict=True):
            if len(parts) > 1:
                assert answer.outputs[0].token_ids == theirs(folder, parts)
        statistics = llm.statistics()
        again = llm.chat(conversation(*chats[0]), GREEDY)[0]
        assert again.outputs[0].token_ids == answers[0].outputs[0].token_ids
        assert again.num_cached_tokens
    assert statistics.num_encoder_inputs == 3


def test_answers_of_a_gguf_file_with_its_mmproj_are_the_same(folder, gguf_folder):
    parts = ["what is ", picture(0, (40, 30)), "?"]
    with (
        running_daemon(gguf_folder / "tiny.gguf", "--tokenizer", folder) as daemon,
        LLM(address=daemon.address) as llm,
    ):
        answer = llm.chat(conversation(*parts), GREEDY)[0]
    assert answer.outputs[0].token_ids == theirs(folder, parts)
