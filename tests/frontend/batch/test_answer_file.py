"""Answers on disk: each once, wherever the writer is cut off."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batch.answer_file import AnswerFile
from frontend.batch.lines import BatchInput
from frontend.errors import InvalidInput
from tests.profiles import examples

IDS = [f"row {number}" for number in range(10)]


def source(sha256="s", ids=IDS):
    return BatchInput("in.jsonl", sha256, {each: (i, b"") for i, each in enumerate(ids)})


def line(custom_id, run=0):
    return json.dumps({"custom_id": custom_id, "run": run}).encode() + b"\n"


def opened(folder, model="m", part_rows=3, **more):
    return AnswerFile(folder / "out.jsonl", source(**more), model, part_rows=part_rows)


def answer_the_rest(folder, run=0):
    """Out of order, as engines do."""
    with opened(folder) as answers:
        if not answers.is_complete:
            numbers = [number for number, _ in answers.unanswered()]
            for number in reversed(numbers):
                assert answers.add(IDS[number], line(IDS[number], run))
            answers.finish()
        return answers.num_answered


def assert_whole(folder):
    found = [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == IDS
    assert [each.name for each in folder.iterdir()] == ["out.jsonl"]
    return found


def test_answers_are_in_the_inputs_order_and_no_parts_are_left(tmp_path):
    assert answer_the_rest(tmp_path) == len(IDS)
    assert_whole(tmp_path)
    assert answer_the_rest(tmp_path, run=1) == len(IDS), "a second run asks nothing"
    assert {each["run"] for each in assert_whole(tmp_path)} == {0}


def test_a_second_answer_to_a_row_is_dropped(tmp_path):
    with opened(tmp_path) as answers:
        assert answers.add(IDS[0], line(IDS[0]))
        assert not answers.add(IDS[0], line(IDS[0], run=1))
        assert answers.num_answered == 1


def test_a_torn_last_line_is_cut_off_and_its_row_asked_again(tmp_path):
    with opened(tmp_path) as answers:
        for custom_id in IDS[:5]:
            answers.add(custom_id, line(custom_id))
    parts = tmp_path / "out.jsonl.parts"
    data = (parts / "open.jsonl").read_bytes()
    assert data == line(IDS[3]) + line(IDS[4])
    for size in {*range(0, len(data), 9), len(data) // 2 - 1, len(data) // 2, len(data) - 1}:
        folder = tmp_path / str(size)
        shutil.copytree(parts, folder / parts.name)
        (folder / parts.name / "open.jsonl").write_bytes(data[:size])
        with opened(folder) as answers:
            assert answers.num_answered == 3 + (size >= len(line(IDS[3])))
        answer_the_rest(folder, run=1)
        assert_whole(folder)


class CutOff(BaseException):
    """The process ends here."""


@settings(max_examples=examples(60))
@given(cuts=st.lists(st.integers(0, 40), max_size=4))
def test_wherever_the_writer_is_cut_off_each_row_has_one_answer_in_the_end(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("cut")
    kept: set[str] = set()

    def cut_after(num_calls):
        left = iter(range(num_calls))

        def wrapped(call):
            def cut(*arguments, **more):
                if next(left, None) is None:
                    raise CutOff
                return call(*arguments, **more)

            return cut

        return wrapped

    for run, num_calls in enumerate([*cuts, 10**6]):
        wrap = cut_after(num_calls)
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "replace"), (shutil, "rmtree")):
                patch.setattr(owner, name, wrap(getattr(owner, name)))
            patch.setattr(AnswerFile, "add", wrap(AnswerFile.add))
            with contextlib.suppress(CutOff):
                answer_the_rest(folder, run)
        with opened(folder) as answers:
            if answers.is_complete:
                break
            answered = set(answers._places)
        assert kept <= answered, "an answer that was there is lost"
        kept = answered
    assert_whole(folder)


def test_answers_of_another_input_or_model_are_not_mixed_with_these(tmp_path):
    with opened(tmp_path) as answers:
        answers.add(IDS[0], line(IDS[0]))
    with pytest.raises(InvalidInput, match=r"the input was .* s, and is .* other now"):
        opened(tmp_path, sha256="other")
    with pytest.raises(InvalidInput, match="the model was m, and is n now"):
        opened(tmp_path, model="n")
    with opened(tmp_path) as answers:
        assert answers.num_answered == 1


def test_a_file_of_other_things_is_not_overwritten(tmp_path):
    (tmp_path / "out.jsonl").write_text("my diary\n")
    with pytest.raises(InvalidInput, match="not the answers to"):
        opened(tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "my diary\n"


def test_a_part_that_was_changed_is_refused_by_name(tmp_path):
    with opened(tmp_path) as answers:
        for custom_id in IDS[:4]:
            answers.add(custom_id, line(custom_id))
    part = tmp_path / "out.jsonl.parts" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes().replace(b"row 1", b"row 9"))
    with pytest.raises(InvalidInput, match=r"part-00000\.jsonl is not what was written"):
        opened(tmp_path)


def test_two_writers_of_one_file_are_refused(tmp_path):
    with opened(tmp_path), pytest.raises(InvalidInput, match="another process writes"):
        opened(tmp_path)
