"""Stop strings against `str.find` on the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.detokenizer import StopStringMatcher
from tests.profiles import examples

LETTERS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def chunks_of(text, sizes):
    start = 0
    for size in sizes:
        yield text[start : start + size]
        start += size
    yield text[start:]


def run(matcher, chunks):
    shown = ""
    for chunk in chunks:
        text, matched = matcher.append(chunk)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


def reference(text, stops, include):
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=examples(500), deadline=None)
@given(text=LETTERS, stops=STOPS, sizes=st.lists(st.integers(0, 7)), include=st.booleans())
def test_any_chunking_finds_what_str_find_finds_on_the_whole_text(text, stops, sizes, include):
    matcher = StopStringMatcher(stops, include_in_output=include)
    assert run(matcher, chunks_of(text, sizes)) == reference(text, stops, include)


@settings(max_examples=examples(300), deadline=None)
@given(text=LETTERS, stops=STOPS, sizes=st.lists(st.integers(0, 7)))
def test_withheld_is_exactly_the_longest_suffix_that_could_begin_a_stop_string(text, stops, sizes):
    matcher = StopStringMatcher(stops)
    shown = seen = ""
    for chunk in chunks_of(text, sizes):
        seen += chunk
        shown_now, matched = matcher.append(chunk)
        shown += shown_now
        if matched is not None:
            break
        lengths = [
            length
            for length in range(len(seen) + 1)
            if any(
                length < len(stop) and stop.startswith(seen[len(seen) - length :]) for stop in stops
            )
        ]
        assert shown == seen[: len(seen) - max(lengths, default=0)]


def test_stop_string_over_many_pieces_is_cut_out():
    matcher = StopStringMatcher(["<|user|>"])
    assert [matcher.append(piece) for piece in ["Hi", " <", "|us", "er", "|> more"]] == [
        ("Hi", None),
        (" ", None),
        ("", None),
        ("", None),
        ("", "<|user|>"),
    ]


def test_nothing_is_withheld_when_the_stop_string_is_part_of_the_output():
    matcher = StopStringMatcher(["END"], include_in_output=True)
    assert matcher.append("the EN") == ("the EN", None)
    assert matcher.append("D of") == ("D", "END")
    assert matcher.flush() == ""
