"""`engine-core create`, `show` and `cp`; and presets in `list` and `rm`."""

import json
from pathlib import Path

import pytest
from fetched import fetched_hub_model, tiny_model

from engine_core.model_files import ModelNotFound, download, names, open, stored
from protocol.presets import Parameters, Preset, find_preset, preset_file


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    model = tiny_model(tmp_path, monkeypatch)
    for module in (download, stored, names):
        monkeypatch.setattr(module, "KNOWN_MODELS", (model,))
    cache_manager = "huggingface_hub.utils._cache_manager.HF_HUB_CACHE"
    monkeypatch.setattr(cache_manager, str(tmp_path / "hub"))
    for name in ("XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def create(run, machine):
    def create(name, text):
        (machine / "Modelfile").write_text(text)
        return run("create", name)

    return create


def test_a_name_is_made_listed_copied_shown_and_removed(run, create):
    text = 'FROM tiny\nSYSTEM "S"\nPARAMETER top_k 3\n'
    assert create("mario", text) == (0, "created mario\n", "")
    assert find_preset("mario") == Preset(from_="tiny", system="S", parameters=Parameters(top_k=3))
    assert run("show", "mario", "--modelfile")[1] == text
    assert run("show", "mario", "--parameters")[1] == "top_k 3\n"
    assert run("show", "mario", "--system")[1] == "S\n"
    assert run("show", "mario", "--system", "--template")[0] == 2
    assert run("cp", "mario", "luigi")[0] == 0
    assert find_preset("luigi") == find_preset("mario")
    assert create("peach", "FROM luigi\nPARAMETER seed 1")[0] == 0
    assert find_preset("peach").system == "S"
    assert run("rm", "luigi")[1] == "removed luigi; the files of its model stay\n"
    listed = [(each["name"], each["format"]) for each in json.loads(run("list", "--json")[1])]
    assert listed == [("mario", "preset of tiny"), ("peach", "preset of tiny")]
    assert find_preset("peach").from_ == "tiny"
    assert "mario" in run("list")[1].splitlines()[1]
    assert run("show", "mario", "--json")[1] == "{}\n"
    code, out, _ = run("show", "mario")
    assert (code, "not here yet: engine-core pull tiny" in out, "top_k 3" in out) == (0, True, True)


def test_paths_of_a_modelfile_are_relative_to_it_and_kept_whole(run, machine):
    folder = machine / "files"
    for part in ("model", "poet"):
        (folder / part).mkdir(parents=True)
    (folder / "poet" / "adapter_config.json").write_text("{}")
    (folder / "M").write_text(
        "FROM ./model\nADAPTER poet\nTEMPLATE {% generation %}{% endgeneration %}"
    )
    assert run("create", "mario", "-f", str(folder / "M"))[0] == 0
    made = find_preset("mario")
    assert (made.from_, made.adapter) == (str(folder / "model"), str(folder / "poet"))
    found = open.locate_model("mario", option="--model", report=print)
    assert found.path == folder / "model"


def test_what_cannot_be_made_is_one_line(run, create):
    for text, code, says in (
        ("FROM nothing", 3, "'nothing' is neither a file"),
        ("FROM tiny\nPARAMETER mirostat 1", 2, "Modelfile, line 2: there is no parameter"),
        ("FROM tiny\nADAPTER ./none", 2, "none is neither a folder with adapter_config.json"),
        ("FROM tiny\nTEMPLATE {% if %}", 2, "TEMPLATE is not Jinja2, in its line 1"),
    ):
        ended, out, err = create("mario", text)
        assert (ended, out, err.count("\n")) == (code, "", 1)
        assert says in err
    assert "Modelfile with -f" in run("create", "mario", "-f", "nowhere")[2]
    assert "is the name of a model" in create("tiny", "FROM tiny")[2]
    assert run("cp", "tiny", "a/b")[0] == 2
    assert run("cp", "nothing", "mario")[0] == 3
    assert find_preset("mario") is None


def test_a_broken_preset_is_named_and_skipped(run, create, caplog):
    create("mario", "FROM tiny")
    preset_file("bad").write_text("{")
    code, out, _ = run("list", "--json")
    assert (code, [each["name"] for each in json.loads(out)]) == (0, ["mario"])
    assert "bad.json is no preset" in caplog.text
    assert run("show", "bad")[0] == 2
    with pytest.raises(ModelNotFound, match="mend or delete it"):
        open.locate_model("bad", option="--model", report=print)
    assert run("rm", "bad")[0] == 0


def test_a_fetched_models_figures_are_shown(run, machine):
    snapshot = fetched_hub_model(machine / "hub", "org/name")
    weights = snapshot / "model.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    Path(weights).resolve().write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (snapshot / "config.json").resolve().write_text(
        json.dumps({"architectures": ["X"], "model_type": "x", "max_position_embeddings": 77})
    )
    (snapshot / "generation_config.json").write_text('{"top_k": 5, "repetition_penalty": 1.5}')
    run("cp", "org/name", "mine")
    for name in ("org/name", "mine"):
        code, out, err = run("show", name)
        assert code == 0, err
        assert {*out.splitlines()} >= {
            "architecture    X",
            "weights         2",
            "context length  77",
            "PARAMETER top_k 5",
            "PARAMETER repeat_penalty 1.5",
        }
        facts = json.loads(run("show", name, "--json")[1])
        assert (facts["architecture"], facts["max_model_len"], facts["num_weights"]) == ("X", 77, 2)
        assert (facts["file_format"], facts["tasks"]) == ("safetensors", ["generate"])
        assert facts["default_sampling"] == {"repeat_penalty": 1.5, "top_k": 5}
