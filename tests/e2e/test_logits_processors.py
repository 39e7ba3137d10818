"""A real daemon with an operator's logits processor, with n-gram drafts; what fails in it, and what
it does not take, ends single requests."""

import pytest
from daemons import running_daemon

from frontend import LLM, SamplingParams

pytestmark = pytest.mark.slow

CODE = """
class Next:
    extra_args = ("step", "fails")

    def __init__(self, vocabulary):
        self.size = vocabulary.vocab_size
        self.step, self.last = {}, {}

    def validate_params(self, params, extra_args):
        if not isinstance(extra_args.get("step", 0), int):
            raise ValueError("step must be a whole number")

    def add_row(self, row, params, extra_args, prompt_token_ids, output_token_ids):
        if extra_args.get("fails"):
            raise RuntimeError("as asked")
        self.step[row], self.last[row] = extra_args.get("step"), prompt_token_ids[-1]
        return self.step[row] is not None

    def remove_row(self, row):
        del self.step[row]

    def apply(self, logits, rows, output_token_ids):
        for at, (row, output) in enumerate(zip(rows, output_token_ids)):
            last = int(output[-1]) if len(output) else self.last[row]
            logits[at, (last + self.step[row]) % self.size] += 1e4
        return logits
"""


def params(**extra_args):
    return SamplingParams(
        max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, extra_args=extra_args
    )


def test_an_operators_processor_changes_tokens_also_of_drafts(tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "operators.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ("--logits-processors", "operators:Next", "--speculative", "ngram")
    with running_daemon(tiny_llama, *options) as daemon, LLM(address=daemon.address) as llm:
        wanted = [params(step=0), params(step=5), params(), params(step=1)]
        outputs = llm.generate([{"prompt_token_ids": [7, 8]}] * 4, wanted, use_tqdm=False)
        found = [output.outputs[0].token_ids for output in outputs]
        for at, step in [(0, 0), (1, 5), (3, 1)]:
            assert found[at] == [(8 + step * number) % 97 for number in range(1, 21)]
        for wrong, why in [
            ({"stride": 1}, "'stride', which no logits processor of this engine takes"),
            ({"step": "x"}, "logits processor operators:Next: step must be a whole number"),
            ({"fails": True}, "logits processor operators:Next failed: RuntimeError: as asked"),
        ]:
            (failed,) = llm.generate({"prompt_token_ids": [7, 8]}, params(**wrong), use_tqdm=False)
            assert failed.outputs[0].finish_reason == "error"
            assert why in failed.outputs[0].detail
        again = llm.generate({"prompt_token_ids": [7, 8]}, params(), use_tqdm=False)
        assert again[0].outputs[0].token_ids == found[2]
    with running_daemon(tiny_llama) as daemon, LLM(address=daemon.address) as llm:
        plain = llm.generate({"prompt_token_ids": [7, 8]}, params(), use_tqdm=False)
        assert plain[0].outputs[0].token_ids == found[2]
