"""prompt_embeds of a body: safetensors are read, pickles are not."""

import base64
import io
import json
import re

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.api_errors import ApiError
from frontend.http.openai.prompt_embeds import read_prompt_embeds
from protocol.prompt_embeds import PromptEmbedsInfo

INFO = PromptEmbedsInfo(hidden_size=5, max_bytes=4000)
ROWS = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def body(file):
    return base64.b64encode(file).decode()


def packed(header, data=b"\0" * 20):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return body(len(text).to_bytes(8, "little") + text + data)


def refusal(text, info=INFO):
    with pytest.raises(ApiError) as refused:
        read_prompt_embeds(text, info)
    assert (refused.value.status, refused.value.param) == (400, "prompt_embeds")
    return refused.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_safetensors_writes_is_read(dtype):
    rows = ROWS.to(dtype)
    file = safetensors.torch.save({"any name": rows}, metadata={"made": "by hand"})
    tensor = read_prompt_embeds(body(file), INFO)
    assert tensor.shape == (7, 5)
    assert tensor.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(7, 5), rows)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_of_torch_is_refused_with_what_to_send(is_zip):
    file = io.BytesIO()
    torch.save(ROWS, file, _use_new_zipfile_serialization=is_zip)
    assert "safetensors.torch.save({" in refusal(body(file.getvalue()))


ONE = {"dtype": "F32", "shape": [1, 5], "data_offsets": [0, 20]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("?", "not base64"),
        ("", "no safetensors file: it has 0 bytes"),
        (body(b"\xff" * 30), "header of 18446744073709551615"),
        (packed(b"[1]"), "no safetensors file of one tensor"),
        (packed(b"{" * 9000), "no safetensors file of one tensor"),
        (packed({}), "no safetensors file of one tensor"),
        (packed({"a": ONE, "b": ONE}), "no safetensors file of one tensor"),
        (packed({"a": ONE | {"dtype": "F64"}}), r"F64 of shape \[1, 5\]"),
        (packed({"a": ONE | {"shape": [5]}}), r"shape \[5\]"),
        (packed({"a": ONE | {"shape": [-1, 5]}}), "no safetensors file of one tensor"),
        (packed({"a": ONE | {"shape": [2**62, 2**62]}}), "20 bytes of data"),
        (packed({"a": ONE | {"data_offsets": [4, 24]}}), r"at \[4, 24\]"),
        (packed({"a": ONE}, b"\0" * 19), "19 bytes of data"),
        (packed({"a": ONE}, b"\0" * 21), "21 bytes of data"),
        ("A" * 100_000, "75000 bytes, the limit is 69536"),
    ],
)
def test_what_is_no_such_file_is_refused(text, reason):
    assert re.search(reason, refusal(text))


def test_an_engine_without_it_refuses_before_reading():
    assert "--enable-prompt-embeds" in refusal("?", None)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(file):
    for text in (body(file), packed(file), file.decode("latin-1")):
        try:
            tensor = read_prompt_embeds(text, INFO)
        except ApiError as refused:
            assert refused.status == 400
        else:
            assert len(tensor.data) in {size * tensor.shape[0] * tensor.shape[1] for size in (2, 4)}
