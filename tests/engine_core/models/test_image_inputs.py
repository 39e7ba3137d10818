"""What tensors an image may have, by the model's config.json."""

import numpy as np
import pytest

from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.multimodal.families import input_family
from tests.engine_core.models.tiny_multimodal import CONFIGS, make_image, type_of


def family_of(name, **more):
    return input_family(CONFIGS[name] | {"model_type": type_of(name)} | more)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "vision_config" in CONFIGS[name]])
@pytest.mark.parametrize("size", [(4, 4), (2, 6)])
def test_images_have_as_many_rows_as_the_encoder_makes(name, size):
    image = make_image(name, 0, size)
    assert family_of(name).num_rows("image", image.tensors) == image.num_rows


def places(columns, rows, number=28):
    found = np.full((1, number, 2), -1)
    found[0, : columns * rows] = np.argwhere(np.ones((rows, columns)))[:, ::-1]
    return found


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("gemma4", {"pixel_values": np.zeros((1, 28, 47), np.float32)},
         r"\[1, 28, 47\], the model takes \[1, patches, 48\] with a multiple of 4 up to 4480"),
        ("gemma4", {"pixel_values": np.zeros((1, 27, 48), np.float32)}, "with a multiple of 4"),
        ("gemma4", {"pixel_values": np.zeros((28, 48), np.float32)}, r"shape \[28, 48\]"),
        ("gemma4", {"image_position_ids": places(4, 4)[:, :27]}, r"takes \[1, 28, 2\]"),
        ("gemma4", {"image_position_ids": places(3, 4)}, r"end at \[2, 3\], they must be the"),
        ("gemma4", {"image_position_ids": places(14, 2)}, "multiples of 2 up to 12"),
        ("gemma4", {"image_position_ids": places(4, 4)[:, ::-1]}, "row by row"),
        ("gemma4", {"image_position_ids": places(0, 0)}, r"end at \[-1, -1\]"),
        ("gemma4", {"image_position_ids": np.full((1, 28, 2), 2**63 - 1)}, "and -1 behind"),
        ("gemma4_unified", {"image_position_ids": places(13, 1)}, "multiples of 1 up to 12"),
        ("internvl", {"pixel_values": np.zeros((2, 3, 16, 12), np.float32)}, r"\[images, 3, 16"),
        ("llava, of Pixtral", {"image_sizes": np.array([[16, 12]])}, "two multiples of 8 up to 24"),
    ],
)  # fmt: skip
def test_tensors_of_no_image_are_refused_by_value_and_limit(name, tensors, words):
    with pytest.raises(ValueError, match=words):
        family_of(name).num_rows("image", make_image(name, 0).tensors | tensors)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("gemma4", {"vision_config": None}, "has no vision_config"),
        ("internvl", {"vision_feature_select_strategy": "full"}, "'full' of InternVL is not"),
        ("llava, of Pixtral", {"vision_feature_select_strategy": "default"}, "it must be full"),
    ],
)
def test_what_an_encoder_does_not_do_is_refused_by_name(name, config, words):
    with pytest.raises(UnsupportedArchitecture, match=words):
        family_of(name, **config)
