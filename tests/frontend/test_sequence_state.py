"""One sequence's text, tokens and logprobs, however the engine cuts its outputs."""

import itertools
import pickle
import struct

import pytest
from fake_model import TOKENIZER, ids_of
from hypothesis import example, given
from hypothesis import strategies as st

from frontend.logprobs import logprobs_of
from frontend.sampling_params import SamplingParams
from frontend.sequence_state import SequenceState
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import EngineCoreOutput, FinishReason, Logprobs, TokenizerInfo

_TOKENIZER = Tokenizer.from_welcome(
    TokenizerInfo(fingerprint="bytes", tokenizer_json=None), TOKENIZER.to_str().encode()
)


def output(token_ids, reason=None, **fields):
    return EngineCoreOutput(
        request_id="r", new_token_ids=list(token_ids), finish_reason=reason, **fields
    )


def processor(**params):
    return SequenceState(0, ids_of("p"), SamplingParams(**params), _TOKENIZER)


def pieces(token_ids, cuts):
    edges = [0, *sorted({cut % (len(token_ids) + 1) for cut in cuts}), len(token_ids)]
    return [token_ids[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]


def drive(sequence, parts):
    """Feed all parts, the last one as the end. Returns the deltas and whether to abort."""
    deltas = []
    for number, part in enumerate(parts):
        reason = FinishReason.LENGTH if number == len(parts) - 1 else None
        must_abort = sequence.append_output(output(part, reason))
        deltas.append(sequence.take_output(delta=True))
        if sequence.finished:
            return deltas, must_abort
    return deltas, False


@given(text=st.text(min_size=1, max_size=40), cuts=st.lists(st.integers(0, 200)))
def test_deltas_add_up_to_the_text_at_any_cut(text, cuts):
    """Proves S201."""
    deltas, _ = drive(processor(), pieces(ids_of(text), cuts))
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == ids_of(text)


@example(text="abbaba", stop=["bba"], cuts=[], min_tokens=3)  # it may begin before
@example(text="abbaba", stop=["bba"], cuts=[], min_tokens=4)  # it must end behind
@given(
    text=st.text("ab", min_size=1, max_size=24),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 200)),
    min_tokens=st.integers(0, 12),
)
def test_min_tokens_and_stop_strings_end_where_vllm_ends(text, stop, cuts, min_tokens):
    """The first token behind min_tokens that completes a stop string, wherever it began.
    Proves S201."""
    ends = [n for n in range(min_tokens + 1, len(text) + 1) if text[:n].endswith(tuple(stop))]
    sequence = processor(stop=stop, min_tokens=min_tokens, max_tokens=99)
    parts = pieces(ids_of(text), cuts)
    deltas, must_abort = drive(sequence, parts)
    got = "".join(delta.text for delta in deltas)
    if not ends:
        assert (got, deltas[-1].finish_reason) == (text, "length")
        return
    seen = text[: ends[0]]
    longest = max((s for s in stop if seen.endswith(s)), key=len)
    assert (got, sequence.token_ids) == (seen.removesuffix(longest), ids_of(seen))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", longest)
    assert must_abort == (len(deltas) < len(parts))


def test_logprobs_are_cut_with_the_tokens():
    sequence = processor(stop="b", logprobs=0)
    columns = Logprobs(
        num_positions=3,
        width=1,
        token_ids=struct.pack("<3i", *ids_of("abc")),
        logprobs=struct.pack("<3f", -1.0, -2.0, -4.0),
        ranks=[1, 2, 3],
    )
    assert sequence.append_output(output(ids_of("abc"), logprobs=columns))
    completion = sequence.take_output(delta=False)
    assert len(completion.logprobs) == len(completion.token_ids) == 2
    assert completion.cumulative_logprob == -3.0


@pytest.mark.parametrize("delta", [True, False])
def test_log_probabilities_come_once_in_deltas_and_all_in_outputs_so_far(delta):
    sequence = processor(logprobs=0)
    seen = []
    for text in ("ab", "c"):
        columns = Logprobs(
            num_positions=len(text),
            width=1,
            token_ids=struct.pack(f"<{len(text)}i", *ids_of(text)),
            logprobs=struct.pack(f"<{len(text)}f", *(-1.0,) * len(text)),
            ranks=[1] * len(text),
        )
        sequence.append_output(output(ids_of(text), logprobs=columns))
        completion = sequence.take_output(delta=delta)
        assert [list(entry) for entry in completion.logprobs] == [
            [token_id] for token_id in completion.token_ids
        ]
        assert completion.logprobs[0] == completion.logprobs[:1][0]
        sent = pickle.loads(pickle.dumps(completion.logprobs))
        assert type(sent) is list and sent == completion.logprobs
        seen.append(len(completion.logprobs))
    assert seen == ([2, 1] if delta else [2, 3])


def test_a_sampled_token_outside_the_likeliest_keeps_its_rank():
    columns = Logprobs(
        num_positions=1,
        width=3,
        token_ids=struct.pack("<3i", 9, 4, 5),
        logprobs=struct.pack("<3f", -7.0, -1.0, -2.0),
        ranks=[31],
    )
    [entry] = logprobs_of(columns, None)
    assert [(token, item.rank, item.logprob) for token, item in entry.items()] == [
        (9, 31, -7.0), (4, 1, -1.0), (5, 2, -2.0),
    ]  # fmt: skip


def test_ending_it_from_this_side_releases_what_was_withheld():
    sequence = processor(stop="bx")
    sequence.append_output(output(ids_of("ab")))
    assert sequence.take_output(delta=False).text == "a"
    sequence.finish("abort")
    completion = sequence.take_output(delta=False)
    assert (completion.text, completion.finish_reason) == ("ab", "abort")
    assert not sequence.has_new_output


@pytest.mark.parametrize(
    ("max_tokens", "stop_reason"), [(2, None), (3, "max_model_len"), (None, "max_model_len")]
)
def test_an_answer_that_the_models_length_ends_says_so(max_tokens, stop_reason):
    sequence = processor(max_tokens=max_tokens)
    sequence.append_output(output(ids_of("ab"), FinishReason.LENGTH))
    assert sequence.take_output(delta=False).stop_reason == stop_reason


def test_half_a_character_at_the_end_is_replaced_not_lost():
    sequence = processor()
    sequence.append_output(output(ids_of("é")[:1], FinishReason.LENGTH))
    assert sequence.take_output(delta=False).text == "�"
