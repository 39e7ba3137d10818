"""Frames of prompt_embeds: what is taken is what was sent, and nothing else is taken."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import RequestRefused
from engine_core.scheduler.records.prompt_content import token_ranges
from engine_core.server.prompt_embeds import PromptEmbedsReader, read_prompt_embeds, spelled_out
from protocol.codec import decode_client_message, encode
from protocol.errors import ErrorCode
from protocol.multimodal import TensorRef
from protocol.prompt_embeds import EmbeddedSpan, PromptEmbedsInfo
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

HIDDEN = 6
INFO = PromptEmbedsInfo(hidden_size=HIDDEN, max_bytes=400)


def reader(largest_number=3.4e38):
    return PromptEmbedsReader(INFO, block_size=4, largest_number=largest_number)


def ask(*spans, length=12, **changes):
    """Of spans (start, rows, dtype): span i has frame i."""
    refs = [
        EmbeddedSpan(start=start, data=TensorRef(frame=frame, dtype=dtype, shape=(rows, HIDDEN)))
        for frame, (start, rows, dtype) in enumerate(spans)
    ]
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1] * length,
        sampling_params=SamplingParams(max_tokens=4),
        prompt_embeds=tuple(refs),
    )
    return msgspec.structs.replace(request, **changes)


def numbers(rows, dtype="<f4", value=1.5):
    return np.full((rows, HIDDEN), value, dtype).tobytes()


def with_ref(**changes):
    data = msgspec.structs.replace(
        TensorRef(frame=0, dtype="float32", shape=(2, HIDDEN)), **changes
    )
    return ask(prompt_embeds=(EmbeddedSpan(start=0, data=data),))


@pytest.mark.parametrize(
    ("request_", "frames", "reason"),
    [
        (with_ref(dtype="int32"), [b""], "dtype 'int32'; send one of float32, float16, bfloat16"),
        (with_ref(shape=(2, 5)), [b""], r"shape \[2, 5\], it must be .* hidden size 6"),
        (with_ref(shape=(0, HIDDEN)), [b""], r"shape \[0, 6\]"),
        (with_ref(shape=(-1, HIDDEN)), [b""], r"shape \[-1, 6\]"),
        (with_ref(shape=(1, 2, HIDDEN)), [b""], r"shape \[1, 2, 6\]"),
        (with_ref(frame=1), [numbers(2)], "frame 1 is missing, 1 were sent"),
        (with_ref(), [numbers(1)], "frame 0 has 24 bytes, .* needs 48"),
        (with_ref(), [], "frame 0 is missing"),
        (ask((11, 2, "float32")), [numbers(2)], r"positions \[11, 13\) of a prompt of 12"),
        (ask((-1, 2, "float32")), [numbers(2)], r"positions \[-1, 1\)"),
        (
            ask((0, 2, "float32"), (1, 1, "float32")),
            [numbers(2), numbers(1)],
            "behind others that end at 2; .*without overlap",
        ),
        (
            ask((0, 17, "float32"), length=20),
            [numbers(17)],
            "408 bytes, the limit is 400",
        ),
        (
            ask((0, 1, "float32"), sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0)),
            [numbers(1)],
            "prompt_logprobs with prompt_embeds",
        ),
    ],
)
def test_what_cannot_be_is_refused(request_, frames, reason):
    """Proves S020."""
    with pytest.raises(RequestRefused, match=reason) as refused:
        read_prompt_embeds(reader(), request_, frames)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_an_engine_that_was_not_told_to_takes_none():
    with pytest.raises(RequestRefused, match="--enable-prompt-embeds") as refused:
        read_prompt_embeds(None, ask((0, 1, "float32")), [numbers(1)])
    assert refused.value.code is ErrorCode.NOT_SUPPORTED
    assert read_prompt_embeds(None, ask(), []) == ((), [])


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", {"<u4": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001)}),
        ("float16", {"<u2": (0x7C00, 0xFC00, 0x7E00, 0xFC01)}),
        ("bfloat16", {"<u2": (0x7F80, 0xFF80, 0x7FC0, 0xFF81)}),
    ],
)
def test_infinities_and_nan_are_found_wherever_they_are(dtype, words):
    ((word, wrong),) = words.items()
    largest = {"float32": 0x7F7FFFFD, "float16": 0x7BFF, "bfloat16": 0x7F7E}[dtype]
    for bits in wrong:
        elements = np.full((3, HIDDEN), largest, word)
        read_prompt_embeds(reader(3.4028234e38), ask((2, 3, dtype)), [elements.tobytes()])
        elements[1, 4] = bits
        with pytest.raises(RequestRefused, match=r"not finite, .*position 3, column 4"):
            read_prompt_embeds(reader(3.4028234e38), ask((2, 3, dtype)), [elements.tobytes()])


def test_what_a_model_in_float16_cannot_hold_is_refused():
    of_float16 = reader(65504.0)
    read_prompt_embeds(of_float16, ask((0, 1, "float32")), [numbers(1, value=-65504.0)])
    with pytest.raises(RequestRefused, match="larger than the model's dtype holds"):
        read_prompt_embeds(of_float16, ask((0, 1, "float32")), [numbers(1, value=-66000.0)])
    with pytest.raises(RequestRefused, match="larger than the model's dtype holds"):
        read_prompt_embeds(of_float16, ask((0, 1, "bfloat16")), [b"\x80\xc7" * HIDDEN])


def test_unfinished_requests_together_have_a_bound_too():
    taking, frames = reader(), [numbers(16)]
    kept = [
        read_prompt_embeds(taking, ask((0, 16, "float32"), length=16), frames) for _ in range(16)
    ]
    more = ask((0, 16, "float32"), length=16)
    with pytest.raises(RequestRefused, match=r"6144 bytes, with this one's 384 .* 6400") as full:
        read_prompt_embeds(taking, more, frames)
    assert full.value.code is ErrorCode.QUEUE_FULL
    read_prompt_embeds(taking, msgspec.structs.replace(more, is_resumed=True), frames)
    kept.pop()  # a request has ended
    read_prompt_embeds(taking, more, frames)


def test_contents_are_named_a_block_at_a_time():
    """So that prompts with equal leading rows share blocks."""
    rows = np.arange(10 * HIDDEN, dtype="<f4").reshape(10, HIDDEN)
    (one,), spans = read_prompt_embeds(reader(), ask((3, 7, "float32")), [rows[:7].tobytes()])
    _, longer = read_prompt_embeds(reader(), ask((3, 9, "float32")), [rows[:9].tobytes()])
    assert [(span.start, span.stop) for span in spans] == [(3, 4), (4, 8), (8, 10)]
    assert [(span.start, span.stop) for span in longer] == [(3, 4), (4, 8), (8, 12)]
    assert spans[:2] == longer[:2]
    assert spans[2].content_hash != longer[2].content_hash
    assert token_ranges([one], 12) == [slice(0, 3), slice(10, 12)]
    spelled = [spelled_out([1] * 12, each) for each in (spans, longer)]
    assert spelled[0][:8] == spelled[1][:8]
    assert spelled[0][8:10] != spelled[1][8:10]
    assert (spelled[0][10:], spelled[0][:3]) == ([1, 1], [1, 1, 1])


SPANS = st.lists(
    st.builds(
        EmbeddedSpan,
        start=st.integers(-2, 14),
        data=st.builds(
            TensorRef,
            frame=st.integers(-1, 3),
            dtype=st.sampled_from(["float32", "float16", "bfloat16", "uint8", "f"]),
            shape=st.one_of(
                st.tuples(st.integers(1, 5), st.just(HIDDEN)),
                st.lists(st.integers(-3, 2**40), max_size=4).map(tuple),
            ),
        ),
    ),
    max_size=3,
)
FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=64),
        st.integers(1, 5).flatmap(lambda n: st.binary(min_size=12 * n, max_size=12 * n)),
    ),
    max_size=3,
)


@given(SPANS, FRAMES)
def test_any_frames_are_taken_whole_or_refused_by_name(spans, frames):
    """Through the codec. What is taken lies where it was sent to, and is finite."""
    message = decode_client_message(encode(ask(prompt_embeds=tuple(spans))))
    try:
        rows, contents = read_prompt_embeds(reader(), message, frames)
    except RequestRefused as refused:
        assert "prompt_embeds" in str(refused)
        return
    assert len(rows) == len(spans)
    for each, span in zip(rows, spans, strict=True):
        assert bytes(each.data) == frames[span.data.frame]
        assert (each.start, each.stop) == (span.start, span.stop)
        assert each.data.nbytes == span.num_bytes
        if each.dtype != "bfloat16":
            assert np.isfinite(np.frombuffer(each.data, each.dtype)).all()
    covered = [position for span in contents for position in range(span.start, span.stop)]
    assert covered == [position for each in rows for position in range(each.start, each.stop)]
