"""Files of images against transformers' `load_image`, and files that are no image."""

import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multimodal_model import png_header
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image as their_load_image

from frontend.errors import InvalidInput
from frontend.multimodal.images import load_image
from tests.profiles import examples

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 14, 4), dtype=np.uint8)
RGBA = Image.fromarray(PIXELS)
DEEP = Image.fromarray(np.arange(9 * 14, dtype=np.uint16).reshape(9, 14) * 520)


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def animation() -> bytes:
    frames = [Image.new("RGB", (14, 9), color) for color in ("red", "blue")]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


RGB = RGBA.convert("RGB")
FILES = {
    "PNG": file_of(RGB, "PNG"),
    "PNG with transparency": file_of(RGBA, "PNG"),
    "PNG of a palette": file_of(RGB.quantize(5), "PNG", transparency=2),
    "PNG of two colours": file_of(RGB.convert("1"), "PNG"),
    "PNG, grey and transparent": file_of(RGBA.convert("LA"), "PNG"),
    "PNG of 16 bits": file_of(DEEP, "PNG"),
    "TIFF of 16 bits": file_of(DEEP, "TIFF"),
    "TIFF, CMYK": file_of(RGB.convert("CMYK"), "TIFF"),
    "JPEG, CMYK": file_of(RGB.convert("CMYK"), "JPEG"),
    "JPEG, grey": file_of(RGB.convert("L"), "JPEG"),
    "WebP": file_of(RGBA, "WEBP"),
    "BMP": file_of(RGB, "BMP"),
    "an animation": animation(),
    **{
        f"JPEG turned {number}": file_of(RGB, "JPEG", exif=turned(number)) for number in range(1, 9)
    },
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_transformers_reads_them(name, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(FILES[name])
    ours, theirs = load_image(FILES[name], "image"), their_load_image(str(path))
    assert (ours.mode, ours.size) == ("RGB", theirs.size)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "CMYK", "I;16", "F"])
def test_images_of_pillow_are_read_as_image_processors_read_them(mode):
    image = DEEP if mode == "I;16" else (RGB if mode == "P" else RGBA).convert(mode)
    theirs = convert_to_rgb(image, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(load_image(image, "image")), theirs)


@given(name=st.sampled_from([*FILES]), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_broken_file_is_an_image_or_refused_by_name(name, data):
    """Cut anywhere, with any byte another."""
    file = bytearray(FILES[name])
    if data.draw(st.booleans()):
        del file[data.draw(st.integers(0, len(file) - 1)) :]
    else:
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert load_image(bytes(file), "picture 3").mode == "RGB"
    except InvalidInput as error:
        assert str(error).startswith("picture 3 ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
        (file_of(RGB, "PPM"), "no image of a known format; send one of PNG, JPEG"),
        (file_of(RGB, "ICO"), "no image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a known format"),
        (FILES["PNG"][:-30], "cannot be decoded"),
        (png_header(9000, 9000), "9000x9000 pixels, the limit is 67108864 in all and 32768 a side"),
        (png_header(2**31 - 1, 2**31 - 1), "pixels, the limit is"),
        (png_header(40_000, 1), "40000x1 pixels"),
        (png_header(0, 5), "no image|cannot be decoded|0x5"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused_before_it_is_decoded(data, words):
    tracemalloc.start()
    with pytest.raises(InvalidInput, match=words):
        load_image(data, "image")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_arrays_of_another_form_are_refused(array):
    with pytest.raises(InvalidInput, match="image is an array"):
        load_image(array, "image")
