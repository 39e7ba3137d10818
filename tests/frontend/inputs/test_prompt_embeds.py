"""prompt_embeds of a client: arrays of numpy and torch become spans and frames."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from frontend.errors import InvalidInput
from frontend.inputs.prompt_embeds import embedded_prompt, tensor_of
from protocol.prompt_embeds import PromptEmbedsInfo

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


MODEL = SimpleNamespace(prompt_embeds=PromptEmbedsInfo(hidden_size=3, max_bytes=100))


def embedded(**prompt):
    return embedded_prompt(prompt, MODEL, "prompt")


def taken(prompt):
    """(start, dtype, rows) of each span."""
    return [
        (span.start, span.data.dtype, np.frombuffer(frame, np.float32).reshape(span.data.shape))
        for span, frame in zip(prompt.spans, prompt.frames, strict=True)
    ]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (ROWS, "float32"),
        (np.asfortranarray(ROWS), "float32"),
        (np.stack([ROWS, ROWS], 1)[:, 0], "float32"),
        (ROWS[None], "float32"),
        (ROWS.astype(np.float16), "float16"),
        (memoryview(ROWS), "float32"),
        (torch.from_numpy(ROWS), "float32"),
        (torch.from_numpy(ROWS).T.contiguous().T, "float32"),
        (torch.from_numpy(ROWS).requires_grad_(), "float32"),
        (torch.from_numpy(ROWS).half(), "float16"),
        (torch.from_numpy(ROWS).bfloat16()[None], "bfloat16"),
    ],
)
def test_arrays_of_numpy_and_torch_are_taken_by_value(array, dtype):
    tensor = tensor_of(array, "it")
    assert tensor[:2] == (dtype, (4, 3))
    found = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, dtype)).view(4, 3)
    assert torch.equal(found.float(), torch.from_numpy(ROWS))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ([[1.0]], "type list"),
        (ROWS.astype(np.float64), "dtype float64; convert it to float32"),
        (ROWS.astype(">f4"), "dtype >f4"),
        (torch.zeros(4, 3, dtype=torch.int64), "dtype int64"),
        (ROWS[0], r"shape \[3\], it must be \[positions, hidden size\]"),
        (ROWS[None, None], r"shape \[1, 1, 4, 3\]"),
        (ROWS[:0], r"shape \[0, 3\]"),
        (b"\0" * 12, "dtype B"),
        (None, "type NoneType"),
    ],
)
def test_what_is_no_such_array_is_refused(array, reason):
    with pytest.raises(InvalidInput, match=reason):
        tensor_of(array, "it")


def test_rows_alone_are_the_whole_prompt():
    prompt = embedded(prompt_embeds=ROWS)
    assert prompt.token_ids == [0] * 4
    ((start, dtype, rows),) = taken(prompt)
    assert (start, dtype) == (0, "float32")
    assert (rows == ROWS).all()


@pytest.mark.parametrize("is_dense", [True, False])
def test_rows_stand_where_the_mask_has_no_token(is_dense):
    """One for each such position, or one for each position of all."""
    mask = [True, False, False, True, False]
    array = ROWS[:3]
    if not is_dense:
        array = np.zeros((5, 3), np.float32)
        array[[1, 2, 4]] = ROWS[:3]
    prompt = embedded(
        prompt_embeds=array, prompt_token_ids=[7, 8, 9, 10, 11], prompt_is_token_ids=mask
    )
    assert prompt.token_ids == [7, 0, 0, 10, 0]
    (first, _, rows), (second, _, last) = taken(prompt)
    assert (first, second) == (1, 4)
    assert (np.concatenate([rows, last]) == ROWS[:3]).all()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt_token_ids": [1, 2, 3, 4]}, "prompt_is_token_ids, which says of each"),
        ({"prompt_is_token_ids": [True]}, "without prompt_token_ids"),
        ({"prompt_token_ids": [1], "prompt_is_token_ids": [True, False]}, "says of each"),
        ({"prompt_token_ids": [1] * 5, "prompt_is_token_ids": [False] * 5}, "has 4 rows"),
        ({"prompt_token_ids": [1] * 4, "prompt_is_token_ids": [True] * 4}, "0 that are no"),
        ({"multi_modal_data": {"image": "x"}}, "and multi_modal_data"),
    ],
)
def test_contradictions_are_refused(prompt, reason):
    with pytest.raises(InvalidInput, match=reason):
        embedded(prompt_embeds=ROWS, **prompt)


def test_an_engine_that_takes_none_says_so_before_anything_is_sent():
    with pytest.raises(InvalidInput, match="--enable-prompt-embeds"):
        embedded_prompt({"prompt_embeds": ROWS}, SimpleNamespace(prompt_embeds=None), "prompt")
