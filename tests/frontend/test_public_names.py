"""`import frontend` is light, and every public name is there."""

import subprocess
import sys

import pytest

import frontend


@pytest.mark.parametrize("name", frontend.__all__)
def test_every_public_name_loads(name):
    assert getattr(frontend, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = frontend.nothing


def test_importing_the_public_names_loads_nothing_heavy():
    program = (
        "import sys; from frontend import LLM, AsyncLLM, SamplingParams; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'tqdm')"
        " if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
