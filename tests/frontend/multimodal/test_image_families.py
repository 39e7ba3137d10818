"""Tensors and tokens of images, against transformers' processors."""

import functools

import numpy as np
import pytest
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from frontend.media import MediaItem
from tests.frontend.multimodal import models

CASES = {
    "qwen2_5_vl": models.qwen2_5_vl,
    "qwen2_vl, older sizes": functools.partial(models.qwen2_5_vl, min_pixels=784, max_pixels=9000),
    "qwen3_vl": models.qwen3_vl,
    "gemma3": models.gemma3,
    "idefics3": models.idefics3,
    "idefics3, whole": functools.partial(models.idefics3, do_image_splitting=False),
    "llava of CLIP": models.llava,
    "llava, odd crop": functools.partial(models.llava, size=61, crop_size=98),
    "llava of SigLIP": functools.partial(models.llava, SiglipImageProcessorPil),
    "llava, padded": functools.partial(models.llava, LlavaImageProcessorPil, do_pad=True),
}
PROMPTS = {
    "gemma3": "a <start_of_image>\nb\n\n<start_of_image> c",
    "qwen": "a <|image_pad|>b<|image_pad|> c",
}
DEFAULT_PROMPT = "a\n<image>b\n\n<image>\nc"


@functools.cache
def case_of(name: str) -> models.Case:
    return CASES[name]()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def compare(case: models.Case, images: list[Image.Image]) -> None:
    """Tokens equal, tensors to the bit, places where transformers' processor has its tokens."""
    prompt = PROMPTS.get(case.model_type.split("2")[0].split("3_")[0], DEFAULT_PROMPT)
    ours = case.ours().process(
        prompt, [MediaItem("image", image, "image") for image in images], add_special_tokens=True
    )
    theirs = case.processor(images=[images], text=[prompt], return_tensors="np")
    assert ours.token_ids == theirs["input_ids"][0].tolist()
    parts = [
        {name: _array(ref, ours.frames) for name, ref in each.tensors.items()}
        for each in ours.inputs
    ]
    axis = 1 if case.model_type == "idefics3" else 0
    for name in parts[0]:
        joined = np.concatenate([part[name] for part in parts], axis=axis)
        assert joined.dtype == theirs[name].dtype
        np.testing.assert_array_equal(joined, theirs[name])
    rows = [
        each.start + offset + number
        for each in ours.inputs
        for offset, count in each.runs or ((0, each.stop - each.start),)
        for number in range(count)
    ]
    token_id = case.ours()._family("image").token_id
    assert rows == np.flatnonzero(theirs["input_ids"][0] == token_id).tolist()


def _array(ref, frames):
    return np.frombuffer(frames[ref.frame], dtype=ref.dtype).reshape(ref.shape)


@pytest.mark.parametrize("name", CASES)
def test_images_become_what_transformers_makes_of_them(name):
    compare(case_of(name), [noise(70, 51), noise(33, 120, seed=1)])
