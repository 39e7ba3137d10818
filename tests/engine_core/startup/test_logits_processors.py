"""Only what the operator names is loaded, by entry point or by module and class; what is no logits
processor does not start the engine."""

import sys

import pytest

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.logits_processors import ServedVocabulary
from engine_core.options.checks import check_device
from engine_core.options.engine import EngineOptions
from engine_core.startup.logits_processors import load_processors

VOCABULARY = ServedVocabulary(50, (2,), None)
CODE = """
class Good:
    extra_args = ["strength"]
    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
    def validate_params(self, params, extra_args): pass
    def add_row(self, row, params, extra_args, prompt_token_ids, output_token_ids): return True
    def remove_row(self, row): pass
    def apply(self, logits, rows, output_token_ids): return logits

class NoApply(Good):
    apply = property()

class NoNames(Good):
    extra_args = "strength"

class Raises(Good):
    def __init__(self, vocabulary):
        raise OSError("no table")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installed, with three entry points, two of one name in two packages."""
    (tmp_path / "made_up.py").write_text(CODE)
    (tmp_path / "explodes.py").write_text("raise SystemError('imported')")
    for name, points in {
        "one": "good = made_up:Good\nbad = explodes:Any\ntwice = made_up:Good",
        "two": "twice = made_up:NoApply",
    }.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        text = f"[engine_core.logits_processors]\n{points}\n"
        (folder / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("made_up", None)


@pytest.mark.usefixtures("package")
def test_only_what_is_named_is_loaded():
    assert load_processors((), VOCABULARY) == ()
    assert "made_up" not in sys.modules
    by_name, by_class = load_processors(("good", "made_up:Good"), VOCABULARY)
    assert type(by_name.processor) is type(by_class.processor)
    assert by_name.processor.vocabulary == VOCABULARY
    assert (by_name.name, by_class.name) == ("good", "made_up:Good")
    assert "explodes" not in sys.modules


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["god"], "no installed package has it .*there are: bad, good, twice"),
        (["bad"], "bad failed: SystemError: imported"),
        (["twice"], "several packages offer it, as made_up:Good and made_up:NoApply"),
        (["good", "good"], "names one twice"),
        (["nothing:There"], "No module named 'nothing'"),
        (["made_up:Other"], "no attribute 'Other'"),
        (["made_up:NoApply"], "NoApply failed: AttributeError"),
        (["made_up:NoNames"], "extra_args must be a list of names"),
        (["made_up:Raises"], "Raises failed: OSError: no table"),
    ],
)
def test_what_is_no_processor_does_not_start_the_engine(names, why):
    with pytest.raises(ConfigurationError, match=why):
        load_processors(names, VOCABULARY)


def test_a_gpu_refuses_them_by_name():
    with pytest.raises(ConfigurationError, match="--logits-processors good runs on a CPU only"):
        check_device(EngineOptions(model="m", logits_processors=("good",)), traits_of("cuda"))
