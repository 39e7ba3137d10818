"""From messages with images to what the engine gets, and what happens when it is lost."""

import asyncio
import io
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_engine import wait_until
from fake_model import ids_of
from file_server import FileServer
from multimodal_model import INFO, NUM_TOKENS, PARTS_TEMPLATE, data_url, image_message, png
from PIL import Image

from frontend.async_llm import AsyncLLM
from frontend.errors import InvalidInput
from frontend.llm import LLM
from frontend.multimodal import inputs
from frontend.multimodal.media import has_media
from frontend.sampling_params import SamplingParams
from protocol.codec import binary_frame

FEW = SamplingParams(max_tokens=3, temperature=0.0)
IMAGE = 257


@pytest.fixture
def llm(multimodal_engine):
    with LLM(address=multimodal_engine.address) as made:
        yield made


def pixels(engine, index=-1, item=0):
    ref = engine.requests[index].multimodal_inputs[item].tensors["pixel_values"]
    data = binary_frame(ref, engine.frames[index])
    return np.frombuffer(data, dtype=ref.dtype).reshape(ref.shape)


def test_an_image_in_a_message_arrives_as_tensors_and_places(llm, multimodal_engine):
    [output] = llm.chat([image_message(data_url(png()))], FEW, use_tqdm=False)
    [request] = multimodal_engine.requests
    [given] = request.multimodal_inputs
    before = ids_of("user:what is it?")
    expected = [*before, *[IMAGE] * NUM_TOKENS, *ids_of(";")]
    assert request.prompt_token_ids == expected == output.prompt_token_ids
    assert (given.start, given.stop, given.runs) == (len(before), len(before) + NUM_TOKENS, ())
    assert output.prompt == "user:what is it?<image>;"
    red = pixels(multimodal_engine)
    assert red.shape == (1, 3, 28, 28)
    assert np.ptp(red, axis=(2, 3)).max() == 0
    np.testing.assert_allclose(red[0, :, 0, 0], [1.93033625, -1.75209713, -1.48021978], atol=1e-6)


def test_all_forms_of_an_image_are_one(multimodal_engine, tmp_path):
    file = tmp_path / "red.png"
    file.write_bytes(png())
    picture = Image.open(io.BytesIO(png()))
    forms = [
        {"type": "image_url", "image_url": {"url": data_url(png())}},
        {"type": "image_url", "image_url": data_url(png())},
        {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        {"type": "input_image", "image_url": data_url(png())},
        {"type": "image", "image": picture},
        {"type": "image", "image": png()},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": file},
        {"type": "image", "path": str(file)},
        {"type": "image_pil", "image_pil": picture},
        {"type": "image", "image": np.asarray(picture)},
    ]
    with LLM(address=multimodal_engine.address, allowed_local_media_path=tmp_path) as llm:
        llm.chat([[{"role": "user", "content": [form]}] for form in forms], FEW, use_tqdm=False)
        for data in ({"image": picture}, {"image": [picture]}):
            llm.generate({"prompt": "user:<image>;", "multi_modal_data": data}, FEW, use_tqdm=False)
        ids = [*ids_of("user:"), IMAGE, *ids_of(";")]
        for prompt in (ids, ids[:5] + [IMAGE] * NUM_TOKENS + ids[6:]):
            given = {"prompt_token_ids": prompt, "multi_modal_data": {"image": [picture]}}
            llm.generate(given, FEW, use_tqdm=False)
    sent = zip(multimodal_engine.requests, multimodal_engine.frames, strict=True)
    first, *others = [(one.prompt_token_ids, one.multimodal_inputs, frames) for one, frames in sent]
    assert len(others) == len(forms) + 3
    assert all(other == first for other in others)


def test_a_template_of_texts_gets_the_placeholder_on_a_line_of_its_own(start_engine):
    engine = start_engine(multimodal=INFO)
    with LLM(address=engine.address) as llm:
        [output] = llm.chat([image_message(data_url(png()))], FEW, use_tqdm=False)
    assert output.prompt == "user:what is it?\n<image>;"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "no place"}, "0 placeholders '<image>' for 1 inputs; write one for each"),
        ({"prompt": "<image><image>"}, "2 placeholders '<image>' for 1 inputs"),
        ({"prompt_token_ids": [IMAGE] * 3}, "3 placeholders '<image>' for 1 inputs"),
        ({"prompt": "<image>" * 3, "multi_modal_data": {"image": [png()] * 3}},
         "has 3 of type 'image', and model fake takes at most 2 .*send fewer"),
        ({"prompt": "x", "multi_modal_data": {"audio": b""}}, "takes no input 'audio'"),
        ({"prompt": "x", "multi_modal_data": {"video": b""}}, "has 'video', .*known are 'image'"),
        ({"prompt": "x", "multi_modal_data": [1]}, "multi_modal_data is list"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 7}}, "image 0 is int; give an image"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_it_is_sent(llm, multimodal_engine, prompt, words):
    with pytest.raises(InvalidInput, match=words):
        llm.generate({"multi_modal_data": {"image": png()}, **prompt}, FEW, use_tqdm=False)
    assert not multimodal_engine.requests


def test_an_image_for_a_model_of_texts_is_refused_by_its_name(start_engine):
    engine = start_engine()
    with LLM(address=engine.address) as llm:
        for call, given in (
            (llm.chat, [image_message(data_url(png()))]),
            (llm.generate, {"prompt": "x", "multi_modal_data": {"image": png()}}),
        ):
            with pytest.raises(InvalidInput, match="model 'fake' takes text only; leave them out"):
                call(given, FEW, use_tqdm=False)


def test_a_prompt_with_an_image_is_not_truncated(llm):
    params = SamplingParams(max_tokens=3, truncate_prompt_tokens=5)
    given = {"prompt": "<image>", "multi_modal_data": {"image": png()}}
    with pytest.raises(InvalidInput, match="truncate_prompt_tokens is 5, and prompt has images"):
        llm.generate(given, params, use_tqdm=False)


def test_without_pillow_the_error_says_what_to_install(llm, monkeypatch):
    url = data_url(png())
    for name in [*sys.modules]:
        if name.startswith("frontend.multimodal"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match=r"PIL.*pip install engine-core\[multimodal\]"):
        llm.chat([image_message(url)], FEW, use_tqdm=False)


async def test_after_the_loss_of_the_engine_its_tensors_are_sent_again(start_engine, address):
    script = {"multimodal": INFO, "chat_template": PARTS_TEMPLATE, "step_s": 0.01}
    first = start_engine(die_after_tokens=3, **script)
    async with AsyncLLM(address, reconnect_timeout_s=20) as llm:
        stream = llm.chat([image_message(data_url(png()))], SamplingParams(max_tokens=6))
        task = asyncio.create_task(_last(stream))
        await asyncio.to_thread(first.join)
        second = start_engine(**script)
        output = await task
    assert len(output.outputs[0].token_ids) == 6
    assert second.requests[0].output_token_ids == output.outputs[0].token_ids[:3]
    assert second.requests[0].multimodal_inputs == first.requests[0].multimodal_inputs
    assert second.frames == first.frames
    assert len(second.frames[0][0]) == 3 * 28 * 28 * 4


async def _last(stream):
    return [output async for output in stream][-1]


async def test_decoding_leaves_the_event_loop_free(multimodal_engine, monkeypatch):
    may_go_on = threading.Event()
    kind = inputs.KINDS["image"]

    def slowly(source, name):
        assert may_go_on.wait(10)
        return kind[1](source, name)

    monkeypatch.setattr(inputs, "KINDS", {"image": (kind[0], slowly)})
    async with AsyncLLM(multimodal_engine.address) as llm:
        task = asyncio.create_task(_last(llm.chat([image_message(data_url(png()))], FEW)))
        text = await _last(llm.generate("hello", FEW))
        assert len(text.outputs[0].token_ids) == 3
        assert not task.done()
        may_go_on.set()
        assert len((await task).outputs[0].token_ids) == 3


def test_frames_are_forgotten_when_a_request_is_over(llm, multimodal_engine):
    llm.chat([image_message(data_url(png()))], FEW, use_tqdm=False)
    wait_until(lambda: multimodal_engine.num_live == 0)
    assert len(llm._client.session.requests) == 0


def test_files_outside_the_allowed_folder_are_refused(multimodal_engine, tmp_path):
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    allowed.mkdir()
    outside.write_bytes(png())
    (allowed / "link.png").symlink_to(outside)
    (allowed / "folder").mkdir()
    os.mkfifo(allowed / "pipe")
    with LLM(address=multimodal_engine.address, allowed_local_media_path=allowed) as llm:
        for name, words in (
            (outside, "not below --allowed-local-media-path"),
            (f"file://{outside}", "not below"),
            (allowed / ".." / "outside.png", "not below"),
            (allowed / "link.png", "not below"),
            (allowed / "folder", "Is a directory"),
            (allowed / "pipe", "no file"),
            (allowed / "missing.png", "No such file"),
            ("relative.png", "not below"),
            ("a\0b", "cannot be read|not below"),
            (
                "http://127.0.0.1/x.png",
                "only from hosts that --allow-media-url .*; send the file itself",
            ),
            ("HTTPS://example.org/x.png", "only from hosts that --allow-media-url"),
            ("ftp://example.org/x.png", "only http and https are fetched"),
            ("data:image/png,abc", "must be of the form data:image/png;base64"),
            ("data:image/png;base64,@@", "no base64"),
        ):
            part = {"type": "image", "image": name}
            with pytest.raises(InvalidInput, match=words):
                llm.chat([{"role": "user", "content": [part]}], FEW, use_tqdm=False)
    with LLM(address=multimodal_engine.address) as llm:
        part = {"type": "image", "image": Path(outside)}
        with pytest.raises(InvalidInput, match="files are not read; send it as a data URL, or"):
            llm.chat([{"role": "user", "content": [part]}], FEW, use_tqdm=False)
    with pytest.raises(InvalidInput, match="is no folder"):
        LLM(address=multimodal_engine.address, allowed_local_media_path=outside)


def test_the_files_of_a_prompt_share_the_seconds_for_fetching(multimodal_engine, monkeypatch):
    monkeypatch.setattr(inputs, "FETCH_S", 0.5)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(png())}\r\n\r\n".encode()
    with FileServer(head, png(), pause_s=0.3) as server:
        host = f"127.0.0.1:{server.port}"
        message = image_message(f"http://{host}/a.png")
        with LLM(address=multimodal_engine.address, allow_media_url=host) as llm:
            llm.chat([message], FEW, use_tqdm=False)
            message["content"] *= 2
            with pytest.raises(InvalidInput, match="more than the 10 s that a prompt's files have"):
                llm.chat([message], FEW, use_tqdm=False)
    assert pixels(multimodal_engine).shape == (1, 3, 28, 28)


def test_a_vector_of_an_image_is_refused_by_name(start_engine):
    """Nothing of a prompt is left out without a word."""
    tasks = {"tasks": ("generate", "embed")}
    engine = start_engine(multimodal=INFO, model_fields=tasks)
    with LLM(address=engine.address) as llm:
        for data in ({"image": png()}, {}):
            with pytest.raises(InvalidInput, match="'multi_modal_data', which this engine does"):
                llm.embed({"prompt": "<image>", "multi_modal_data": data}, use_tqdm=False)
        text = {"prompt": "hello", "multi_modal_data": None}
        assert llm.generate(text, FEW, use_tqdm=False)[0].prompt_token_ids == ids_of("hello")
    assert not engine.requests[0].multimodal_inputs


class Text(str):
    def __iter__(self):
        raise AssertionError("megabytes of text are not walked through")


def test_images_are_looked_for_in_parts_and_not_in_texts():
    assert not has_media([{"role": "user", "content": Text("hello")}])
    assert not has_media([{"role": "user", "content": [{"type": ["image"]}]}])
    assert has_media([{"role": "user", "content": ({"type": "image"},)}])
