"""Each target of `make fuzz` over its valid inputs and a few hundred changed ones, without
atheris."""

import logging
import random

import pytest

from tests.fuzz.mutation import join_parts, mutate, split_parts
from tests.fuzz.run import MODULES
from tests.fuzz.targets import TARGETS

_CHANGED = {"codec": 2000, "engine": 100, "chat_template": 100}


@pytest.fixture(autouse=True)
def logs_are_heard_again():
    yield
    logging.disable(logging.NOTSET)  # a target has silenced all


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_give_a_result_or_a_documented_error(name):
    target = TARGETS[name]()
    seeds = target.inputs()
    for data in seeds:
        target(data)
    rng = random.Random(13)
    for _ in range(_CHANGED.get(name, 300)):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 2, 4))):
            data = mutate(data, rng, words=target.words)
        target(data)


def test_every_target_has_modules_that_guide_it():
    assert MODULES.keys() == TARGETS.keys()


def test_parts_survive_joining_and_any_bytes_are_parts():
    parts = [b"", b"a", b"{}" * 300]
    assert split_parts(join_parts(parts)) == parts
    rng = random.Random(1)
    for _ in range(300):
        parts = split_parts(rng.randbytes(rng.randrange(40)))
        assert split_parts(join_parts(parts)) == parts


def test_mutations_are_repeatable_and_keep_json_json():
    data = join_parts([b'{"a": [1, {"b": "c"}]}'])
    once, again = ([mutate(data, random.Random(seed)) for seed in range(50)] for _ in range(2))
    assert once == again
    assert len(set(once)) > 20
