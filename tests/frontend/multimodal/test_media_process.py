"""Foreign files are decoded in a process that they can end, and nothing else."""

import io
import os
import signal
import threading
import wave

import msgspec
import numpy as np
import pytest
from multimodal_model import data_url, image_message, png
from PIL import Image

from frontend.async_llm import AsyncLLM
from frontend.errors import InvalidInput
from frontend.multimodal import media_process
from frontend.multimodal.audio import decode_audio, load_audio
from frontend.multimodal.images import decode_image, load_image
from frontend.multimodal.media_process import LIMITS, media_processes
from frontend.sandbox_pool import SandboxPool
from protocol.sandbox import SandboxProcess


def many_scans(number: int) -> bytes:
    """A JPEG of a few hundred kilobytes that refines the same pixels again and again."""
    file = io.BytesIO()
    Image.new("L", (2048, 2048)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


@pytest.fixture
def bounded(monkeypatch):
    """A pool with other limits."""
    pools = []

    def make(**limits):
        changed = msgspec.structs.replace(LIMITS, **limits)
        module = "frontend.multimodal.media_sandbox"
        pools.append(SandboxPool(lambda: SandboxProcess(module, changed), 1))
        monkeypatch.setattr(media_process, "media_processes", pools[-1])
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_file_and_a_sound_are_what_they_are_in_a_thread():
    pixels = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    for data in (file.getvalue(), bytearray(file.getvalue()), memoryview(file.getvalue())):
        found = load_image(data, "image")
        assert (found.mode, found.size) == ("RGB", (53, 37))
        np.testing.assert_array_equal(np.asarray(found), pixels)
    sound = io.BytesIO()
    with wave.open(sound, "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        writer.writeframes(np.arange(9000, dtype="<i2").tobytes())
    expected = np.frombuffer(decode_audio(sound.getvalue(), "a", 16_000), np.float32)
    np.testing.assert_array_equal(load_audio(sound.getvalue(), "a", 16_000), expected)


@pytest.mark.parametrize("data", [b"", b"text\nand more", png()[:40], png()[:-40]])
def test_the_words_of_a_refusal_are_the_same(data):
    with pytest.raises(InvalidInput) as theirs:
        decode_image(data, "image 3")
    with pytest.raises(InvalidInput) as ours:
        load_image(data, "image 3")
    assert str(ours.value) == str(theirs.value)


def test_a_file_that_takes_too_long_or_too_much_ends_alone(bounded):
    bounded(cpu_s=0.3)
    with pytest.raises(InvalidInput, match=r"image 0 cannot be .*processor time: more than 0\.3 s"):
        load_image(many_scans(9000), "image 0")
    assert load_image(png(), "image").size == (40, 30)
    bounded(memory_bytes=300 << 20)
    file = io.BytesIO()
    Image.new("L", (8000, 8000)).save(file, "PNG")
    with pytest.raises(InvalidInput, match=r"image 0 .*memory"):
        load_image(file.getvalue(), "image 0")
    assert load_image(png(), "image").size == (40, 30)


def test_a_crash_of_the_decoder_is_that_files_refusal(bounded):
    pool = bounded()
    load_image(png(), "image")
    crash = threading.Timer(0.1, os.kill, (*pool.pids, signal.SIGSEGV))
    crash.start()
    with pytest.raises(InvalidInput, match=r"ended \(crash: by signal 11\); send another file"):
        load_image(many_scans(2000), "image")
    assert load_image(png(), "image").size == (40, 30)


async def test_the_processes_end_with_the_last_client(multimodal_engine):
    async with AsyncLLM(multimodal_engine.address) as llm:
        await llm.chat_prompt([image_message(data_url(png()))])
        assert media_processes.pids
    assert not media_processes.pids
