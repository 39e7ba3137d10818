"""Which engines hold which blocks."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from frontend.fleet.prefix_index import PrefixIndex

ENGINES = range(3)
KEYS = st.lists(st.integers(0, 12), unique=True)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "store", "remove", "clear", "update", "whole"]),
        st.sampled_from(ENGINES),
        KEYS,
        KEYS,
    )
)


def joined(keys):
    return struct.pack(f"<{len(keys)}Q", *keys)


def leading(keys, held):
    return next((length for length, key in enumerate(keys) if key not in held), len(keys))


@given(steps=STEPS, prompt=KEYS)
def test_the_index_holds_what_it_was_told(steps, prompt):
    index, held = PrefixIndex(), {engine: set() for engine in ENGINES}
    for what, engine, keys, others in steps:
        match what:
            case "use" | "store":
                getattr(index, what)(engine, keys)
                held[engine] |= set(keys)
            case "remove":
                index.remove(engine, keys)
                held[engine] -= set(keys)
            case "clear":
                index.clear(engine)
                held[engine] = set()
            case _:
                is_whole = what == "whole"
                index.update(engine, joined(keys), joined(others), is_whole=is_whole)
                held[engine] = (set() if is_whole else held[engine] - set(others)) | set(keys)
    lengths = {engine: leading(prompt, held[engine]) for engine in ENGINES}
    assert index.match(prompt, ENGINES) == {e: length for e, length in lengths.items() if length}
    assert index.match(prompt, [1]) == ({1: lengths[1]} if lengths[1] else {})
    assert [index.num_blocks[engine] for engine in ENGINES] == [len(held[e]) for e in ENGINES]
    assert len(index) == len(set().union(*held.values()))


@given(prompts=st.lists(st.lists(st.integers(0, 50), unique=True), max_size=20))
def test_no_more_blocks_are_kept_than_allowed_and_the_beginning_of_the_last_prompt_longest(prompts):
    index = PrefixIndex(max_blocks=8)
    for number, keys in enumerate(prompts):
        index.use(number % 2, keys)
        assert len(index) <= 8
        assert index.match(keys, [number % 2]).get(number % 2, 0) == min(len(keys), 8)
    assert index.num_blocks.total() >= len(index)
