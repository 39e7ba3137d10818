"""Tensors and tokens of images, against transformers' processors."""

import functools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from frontend.errors import InvalidInput
from frontend.multimodal.inputs import MultiModalProcessor
from frontend.multimodal.media import MediaItem, MediaSources
from tests.frontend.multimodal import models
from tests.profiles import examples

CASES = {
    "qwen2_5_vl": models.qwen2_5_vl,
    "qwen2_vl, older sizes": functools.partial(models.qwen2_5_vl, min_pixels=784, max_pixels=9000),
    "qwen3_vl": models.qwen3_vl,
    "gemma3": models.gemma3,
    "gemma4": models.gemma4,
    "unified gemma4": functools.partial(models.gemma4, models.MergedPatches, "gemma4_unified"),
    "internvl": models.internvl,
    "internvl, few tiles": functools.partial(models.internvl, min_patches=3, max_patches=5),
    "idefics3": models.idefics3,
    "idefics3, whole": functools.partial(models.idefics3, do_image_splitting=False),
    "mistral3": models.mistral3,
    "llava of Pixtral": models.llava_of_pixtral,
    "llava of CLIP": models.llava,
    "llava, odd crop": functools.partial(models.llava, size=61, crop_size=98),
    "llava of SigLIP": functools.partial(models.llava, SiglipImageProcessorPil),
    "llava, padded": functools.partial(models.llava, LlavaImageProcessorPil, do_pad=True),
}


@functools.cache
def case_of(name: str) -> models.Case:
    return CASES[name]()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def processor(info) -> MultiModalProcessor:
    return MultiModalProcessor(
        "tiny", info, models.our_tokenizer(), max_model_len=9999, sources=MediaSources
    )


def compare(case: models.Case, images: list[Image.Image]) -> None:
    """Tokens equal, tensors to the bit, places where transformers' processor has its tokens."""
    placeholder = case.ours().family_of("image").placeholder
    prompt = "a" + "".join(
        f"{lines}{placeholder}{lines}" for lines in ("\n", "\n\n")[: len(images)]
    )
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
        if "[IMG]" in placeholder and name == "pixel_values":
            for part in parts:  # transformers' are of one size, with zeros behind
                missing = np.subtract(theirs[name].shape[2:], part[name].shape[2:])
                part[name] = np.pad(part[name], [(0, 0), (0, 0), *((0, more) for more in missing)])
        joined = np.concatenate([part[name] for part in parts], axis=axis)
        assert joined.dtype == theirs[name].dtype
        np.testing.assert_array_equal(joined, theirs[name])
    rows = [
        each.start + offset + number
        for each in ours.inputs
        for offset, count in each.runs or ((0, each.stop - each.start),)
        for number in range(count)
    ]
    token_id = case.ours().family_of("image").token_id
    assert rows == np.flatnonzero(theirs["input_ids"][0] == token_id).tolist()


def _array(ref, frames):
    return np.frombuffer(frames[ref.frame], dtype=ref.dtype).reshape(ref.shape)


@pytest.mark.parametrize("name", CASES)
def test_images_become_what_transformers_makes_of_them(name):
    compare(case_of(name), [noise(70, 51), noise(33, 120, seed=1)])


SIZES = st.sampled_from([1, 2, 3, 13, 14, 27, 28, 29, 31, 32, 33, 56, 57, 95, 96, 97, 130, 199])


@given(
    name=st.sampled_from([*CASES]), sizes=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=2)
)
@settings(max_examples=examples(60), deadline=None)
def test_images_of_any_size_become_what_transformers_makes_of_them(name, sizes):
    # Pixtral's processor gives nothing for a side that shrinks below a pixel
    is_pixtral = case_of(name).ours().family_of("image").token == "[IMG]"
    assume(not is_pixtral or min(map(min, sizes)) > 2)
    compare(case_of(name), [noise(*size, seed=number) for number, size in enumerate(sizes)])


def test_what_a_family_cannot_take_is_refused_by_name():
    wide = [MediaItem("image", noise(201, 1), "image")]
    with pytest.raises(InvalidInput, match="one side of this model's images may be 200 times"):
        case_of("qwen2_5_vl").ours().process("<|image_pad|>", wide, add_special_tokens=True)
    wide = [MediaItem("image", noise(30_000, 1), "image")]
    with pytest.raises(InvalidInput, match="would become 6720000x224 pixels, the limit is"):
        case_of("llava of CLIP").ours().process("<image>", wide, add_special_tokens=True)
    with pytest.raises(InvalidInput, match="would become 30000x30000"):
        case_of("llava, padded").ours().process("<image>", wide, add_special_tokens=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"do_pan_and_scan": True}, "has do_pan_and_scan True, which this engine does not do"),
        ({"do_resize": False}, "has do_resize False"),
        ({"size": {"shortest_edge": 3}}, "this engine takes height and width"),
        ({"size": {"height": "x", "width": 3}}, "this engine takes height and width"),
    ],
)
def test_settings_that_are_not_done_are_refused_by_name(settings, words):
    case = case_of("gemma3")
    info = replace(case.info(), processor_json=json.dumps(settings).encode())
    with pytest.raises(InvalidInput, match=words):
        processor(info).process("<start_of_image>", [MediaItem("image", noise(9, 9), "image")],
                                add_special_tokens=True)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "paligemma"}, "models of type 'paligemma' are not supported, there are"),
        ({"model_type": "llava_next"}, "'llava_next' are not supported"),
        ({"config_json": b"{}"}, "image_token_id None, which is no token of its tokenizer"),
        ({"config_json": b'{"image_token_id": 99999}'}, "image_token_id 99999, which is no token"),
        ({"processor_json": b'{"image_processor_type": "PixtralImageProcessor"}'},
         "has the image processor PixtralImageProcessor"),
    ],
)  # fmt: skip
def test_models_that_are_not_known_are_refused_by_name(changes, words):
    info = replace(case_of("llava of CLIP").info(), **changes)
    with pytest.raises(InvalidInput, match=words):
        processor(info).part("image")


def test_a_processor_that_came_without_files_goes_by_the_model(tmp_path):
    """Its number of tokens is that of the encoder's patches."""
    vision = {"image_size": 28, "patch_size": 7}
    config = {**models.CONFIGS["idefics3"], "vision_config": vision, "scale_factor": 2}
    sizes = {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 28}}
    info = replace(
        case_of("idefics3").info(),
        config_json=json.dumps(config).encode(),
        processor_json=json.dumps(sizes).encode(),
    )
    item = MediaItem("image", noise(28, 28), "image")
    [given] = processor(info).process("<image>", [item], add_special_tokens=True).inputs
    assert given.stop - given.start == (28 // 7) ** 2 // 2**2
