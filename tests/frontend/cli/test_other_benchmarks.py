"""What users of other benchmarks type behind `bench`."""

import pytest

from frontend.cli.app import run_command_line
from frontend.cli.other_benchmarks import as_typed


def test_the_words_of_vllms_benchmark_are_taken_for_ours():
    typed = ["serve", "--backend", "vllm", "--random-input-len", "9", "--random-output-len=serve"]
    ours = ["--backend", "openai", "--input-len", "9", "--output-len=serve"]
    assert list(as_typed(typed)) == ours
    assert list(as_typed(["--label", "throughput"])) == ["--label", "throughput"]


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        (["throughput"], "all requests at once"),
        (["--host=here"], "use --base-url http://HOST:PORT"),
        (["-m", "x.gguf"], "engine-core serve"),
        (["--save-result"], "use --out NAME"),
        (["--num-promts", "3"], "Did you mean --num-prompts?"),
        (["--base-url", "http://127.0.0.1:9", "--model", "x"], "nothing answers at http://127"),
    ],
)
def test_what_is_otherwise_here_is_one_line(typed, advice, capsys):
    assert run_command_line(["bench", *typed]) == (1 if "--model" in typed else 2)
    said = capsys.readouterr().err
    assert advice in said and said.count("\n") == 1
