"""`engine-core batch` with a real engine, killed in the middle and run again."""

import json
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

NUM_ROWS = 40


def batch(*arguments):
    command = [sys.executable, "-m", "engine_core.cli", "batch", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_that_is_killed_goes_on_and_each_row_has_one_answer(smollm2, tmp_path):
    rows = [
        {
            "custom_id": f"row {number}",
            "url": "/v1/completions",
            "body": {"prompt": f"{number} and", "max_tokens": 4 + 2 * number, "temperature": 0},
        }
        for number in range(NUM_ROWS)
    ]
    rows[7]["body"]["max_tokens"] = -1
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in rows))
    options = (source, answers, "--model", smollm2, "--max-num-seqs", 4, "--num-blocks", 256)
    parts = tmp_path / "out.jsonl.parts" / "open.jsonl"

    first = batch(*options)
    while not parts.exists() or len(parts.read_bytes().splitlines()) < 5:
        assert first.poll() is None, first.communicate()
    first.kill()
    first.communicate()
    kept = parts.read_bytes()
    num_kept = kept.count(b"\n")
    assert 5 <= num_kept < NUM_ROWS
    assert not answers.exists()
    parts.write_bytes(kept + b'{"custom_id": "row 3')  # as a machine that lost its power leaves it

    second = batch(*options)
    said, log = second.communicate()
    assert second.returncode == 0, log
    assert f"{NUM_ROWS} answers in {answers}, {NUM_ROWS - num_kept} of this run" in said
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in rows]
    lines = set(answers.read_bytes().splitlines())
    assert lines >= set(kept.splitlines()), "what was answered before is kept as it was"
    errors = [each["custom_id"] for each in found if each["error"] is not None]
    assert errors == ["row 7"]
    for number, each in enumerate(found):
        if number != 7:
            usage = each["response"]["body"]["usage"]
            assert usage["completion_tokens"] <= 4 + 2 * number

    third = batch(*options)
    said, log = third.communicate()
    assert third.returncode == 0 and "already" in said, log


def test_ctrl_c_keeps_answers_and_wrong_files_are_refused_by_name(smollm2, tmp_path):
    missing = batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", "--model", smollm2)
    _, log = missing.communicate()
    assert missing.returncode != 0
    assert "none.jsonl" in log and "Traceback" not in log
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "{n}", "max_tokens": 100}}\n' for n in range(20)))
    process = batch(source, tmp_path / "out.jsonl", "--model", smollm2)
    parts = tmp_path / "out.jsonl.parts" / "open.jsonl"
    while not parts.exists() or not parts.read_bytes():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, log = process.communicate()
    assert process.returncode != 0
    assert "Traceback" not in log
    assert parts.read_bytes()
