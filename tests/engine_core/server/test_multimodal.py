"""Images of requests are checked before the scheduler sees them."""

import numpy as np
import pytest

from engine_core.errors import RequestRefused
from engine_core.models.multimodal.families import (
    Idefics3Images,
    LlavaImages,
    QwenImages,
)
from engine_core.models.multimodal.sounds import Qwen2AudioSounds, Qwen3ASRSounds, VoxtralSounds
from engine_core.server.multimodal import MultiModalReader
from protocol.errors import InvalidParameter
from protocol.multimodal import MultiModalInput, TensorRef
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

VISION = {"image_size": 8, "patch_size": 4}
LLAVA = LlavaImages({"vision_config": VISION | {"model_type": "clip_vision_model"}})
QWEN = QwenImages({"vision_config": {"patch_size": 4}})
PIXELS = np.ones((1, 3, 8, 8), np.float32)


def make_request(frames, *, modality="image", start=2, stop=6, runs=(), num_inputs=1, **more):
    """`frames`: arrays by name; each input has all of them."""
    refs = {
        name: TensorRef(frame=place, dtype=array.dtype.name, shape=array.shape)
        for place, (name, array) in enumerate(frames.items())
    }
    refs |= more.pop("refs", {})
    inputs = tuple(
        MultiModalInput(
            modality=modality, start=start + 5 * n, stop=stop + 5 * n, tensors=refs, runs=runs
        )
        for n in range(num_inputs)
    )
    request = EngineRequest(
        request_id="r", prompt_token_ids=list(range(12)), multimodal_inputs=inputs,
        sampling_params=SamplingParams(max_tokens=1), **more,
    )  # fmt: skip
    return request, [memoryview(np.ascontiguousarray(a)).cast("B") for a in frames.values()]


def read(frames=None, family=LLAVA, *, max_input_bytes=2000, **options):
    limits = dict.fromkeys(family.modalities, 2)
    reader = MultiModalReader(family, max_items=limits, max_input_bytes=max_input_bytes)
    return reader.read(*make_request(frames or {"pixel_values": PIXELS}, **options))


def test_an_image_is_read_with_its_places():
    (feature,) = read(start=2, stop=8, runs=((0, 2), (4, 2)))
    assert (feature.start, feature.stop, feature.num_rows) == (2, 8, 4)
    assert feature.runs == ((2, 4), (6, 8))
    assert (feature.tensors["pixel_values"] == PIXELS).all()


def test_a_frame_that_many_tensors_name_is_not_looked_at_for_each():
    pixels = np.ones((1, 3, 400, 400), np.float32)
    ref = TensorRef(frame=0, dtype="float32", shape=pixels.shape)
    refs = {str(n): ref for n in range(20_000)}
    with pytest.raises(InvalidParameter, match="bytes and more, the limit is"):
        read({"pixel_values": pixels}, refs=refs, max_input_bytes=4_000_000)


def test_equal_content_has_equal_identifiers_within_a_salt():
    first, again = (read()[0].identifier for _ in range(2))
    assert first == again and len(first) == 32
    other = PIXELS.copy()
    other[0, 0, 0, 0] = 2
    others = [
        read({"pixel_values": other})[0].identifier,
        read({"pixel_values": PIXELS.astype(np.float16)})[0].identifier,
        read(start=2, stop=7, runs=((0, 2), (3, 2)))[0].identifier,
        read(cache_salt="a")[0].identifier,
        read(cache_salt="b")[0].identifier,
    ]
    assert len({first, *others}) == 6


INFINITE = np.full_like(PIXELS, np.inf)
GRID = np.array([[1, 2, 8]], np.int64)
PATCHES = np.ones((16, 96), np.float32)
TILES = np.ones((1, 1, 3, 8, 8), np.float32)
MASK = np.ones((1, 1, 8, 8), np.int64)
IDEFICS = Idefics3Images({"vision_config": VISION, "scale_factor": 1})


SOUND = {"audio_config": {"num_mel_bins": 2, "max_source_positions": 8}}
VOXTRAL, QWEN2_AUDIO, QWEN3_ASR = (
    make(SOUND) for make in (VoxtralSounds, Qwen2AudioSounds, Qwen3ASRSounds)
)


def heard(family, frames, mask=None):
    """Options of `read`: so many frames, of which the mask leaves those with a one."""
    tensors = {"input_features": np.ones((1, 2, frames), np.float32)}
    if mask is not None:
        is_any = family is QWEN3_ASR
        tensors["input_features_mask" if is_any else "feature_attention_mask"] = mask
    return {"family": family, "modality": "audio", "frames": tensors, "max_input_bytes": 9999}


def ones(number, size=16):
    return (np.arange(size) < number)[None].astype(np.int64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (heard(VOXTRAL, 15), r"shape \[1, 2, 15\], the model takes \[windows, 2, 16\]"),
        (heard(VOXTRAL, 16) | {"modality": "image"}, "1 of type 'image', the limit is 0"),
        (heard(QWEN2_AUDIO, 15, ones(9, 15)), r"the model takes \[1, 2, 16\]"),
        (heard(QWEN2_AUDIO, 16, ones(9, 15)), r"feature_attention_mask has shape \[1, 15\]"),
        (heard(QWEN2_AUDIO, 16, ones(0)), "ones and zeros behind them, with at least one"),
        (heard(QWEN2_AUDIO, 16, 1 - ones(9)), "ones and zeros behind them"),
        (heard(QWEN2_AUDIO, 16, 2 * ones(9)), "ones and zeros behind them"),
        (heard(QWEN2_AUDIO, 16, ones(2)), "a sound of 2 frames makes no row"),
        (heard(QWEN2_AUDIO, 16, ones(9)), "4 places in 1 runs, its tensors make 2 rows"),
        (heard(QWEN3_ASR, 16, ones(9)), "has 16 frames for 9, it must be the next multiple of 100"),
        (heard(QWEN3_ASR, 200, ones(100, 200)), "has 200 frames for 100"),
        (heard(QWEN3_ASR, 100, ones(33, 100)), "4 places in 1 runs, its tensors make 5 rows"),
        ({"modality": "audio"}, "1 of type 'audio', the limit is 0.*--limit-mm-per-prompt"),
        ({"num_inputs": 3, "stop": 4, "start": 0}, "3 of type 'image', the limit is 2"),
        ({"start": -1}, r"positions \[-1, 6\) of a prompt of 12"),
        ({"stop": 13}, r"positions \[2, 13\) of a prompt of 12"),
        ({"start": 6}, r"positions \[6, 6\)"),
        (
            {"start": 0, "stop": 6, "runs": ((0, 4),), "num_inputs": 2},
            r"positions \[5, 11\).*end at 6",
        ),
        ({"stop": 5}, "3 places in 1 runs, its tensors make 4 rows"),
        ({"runs": ((0, 4), (3, 1))}, "run of 1 positions from 3 on, of 4, .* ends at 4"),
        ({"runs": ((0, 5),)}, "run of 5 positions from 0 on, of 4"),
        ({"runs": ((0, 0), (0, 4))}, "run of 0 positions"),
        ({"frames": {"pixels": PIXELS}}, r"tensors \['pixels'\], it must have"),
        ({"frames": {"pixel_values": PIXELS[:, :2]}}, r"shape \[1, 2, 8, 8\], the model takes"),
        ({"frames": {"pixel_values": PIXELS.astype(np.int64)}}, "pixel_values is int64"),
        ({"frames": {"pixel_values": INFINITE}}, "not finite"),
        ({"max_input_bytes": 767}, "768 bytes and more, the limit is 767.*--max-mm-input"),
        (
            {"refs": {"pixel_values": TensorRef(frame=7, dtype="float32", shape=(1, 3, 8, 8))}},
            "frame 7 is missing, 1 were sent",
        ),
        (
            {"refs": {"pixel_values": TensorRef(frame=0, dtype="float32", shape=(2, 3, 8, 8))}},
            "has 768 bytes",
        ),
        (
            {"refs": {"pixel_values": TensorRef(frame=0, dtype="complex", shape=(1,))}},
            "dtype 'complex' is unknown",
        ),
        (
            {"family": QWEN, "frames": {"pixel_values": PATCHES, "image_grid_thw": GRID[0]},
             "max_input_bytes": 9999},
            r"image_grid_thw has shape \[3\]",
        ),
        (
            {"family": QWEN, "frames": {"pixel_values": PATCHES, "image_grid_thw": -GRID},
             "max_input_bytes": 9999},
            r"image_grid_thw is \[-1, -2, -8\]",
        ),
        (
            {"family": QWEN, "frames": {"pixel_values": PATCHES[1:], "image_grid_thw": GRID},
             "max_input_bytes": 9999},
            r"shape \[15, 96\], the model takes \[16, 96\]",
        ),
        (
            {"family": QWEN, "frames": {"pixel_values": PATCHES, "image_grid_thw": GRID},
             "runs": ((0, 2), (2, 2)), "max_input_bytes": 9999},
            "4 places in 2 runs",
        ),
        (
            {"family": IDEFICS, "frames": {"pixel_values": TILES, "pixel_attention_mask": MASK[0]},
             "max_input_bytes": 9999},
            "pixel_attention_mask has shape",
        ),
        (
            {"family": IDEFICS,
             "frames": {"pixel_values": 0 * TILES, "pixel_attention_mask": MASK},
             "max_input_bytes": 9999},
            "all zeros",
        ),
    ],
)  # fmt: skip
def test_what_the_encoder_cannot_take_is_refused(options, words):
    with pytest.raises(InvalidParameter, match=words):
        read(**options)


def test_a_model_of_text_refuses_images_and_says_why():
    reader = MultiModalReader(None, max_items={}, max_input_bytes=0, why_text="it is so")
    with pytest.raises(RequestRefused, match="it is so; send text"):
        reader.read(*make_request({"pixel_values": PIXELS}))


def test_images_of_unfinished_requests_are_bounded_together():
    reader = MultiModalReader(LLAVA, max_items={"image": 2}, max_input_bytes=768)
    kept = [reader.read(*make_request({"pixel_values": PIXELS})) for _ in range(16)]
    with pytest.raises(RequestRefused, match=r"12288 bytes.* limit of 12288; retry later"):
        reader.read(*make_request({"pixel_values": PIXELS}))
    assert reader.read(*make_request({"pixel_values": PIXELS}, is_resumed=True))
    kept.clear()
    assert reader.read(*make_request({"pixel_values": PIXELS}))
