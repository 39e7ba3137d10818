"""Presets on disk, and Modelfiles."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.modelfile import modelfile, read_modelfile
from protocol.presets import (
    Parameters,
    Preset,
    PresetError,
    PresetMessage,
    all_presets,
    find_preset,
    model_of,
    preset_file,
    presets_folder,
    remove_preset,
    write_preset,
)

MARIO = Preset(
    from_="tiny",
    system="You are Mario.",
    messages=[PresetMessage("user", "Hi")],
    parameters=Parameters(temperature=0.5, stop=["\n"]),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_what_was_written_is_found_with_its_tag_or_without():
    assert find_preset("mario") is None
    assert all_presets() == {}
    write_preset("mario:latest", MARIO)
    write_preset("mario:v2", Preset(from_="org/name:Q4_K_M"))
    assert find_preset("mario") == find_preset("mario:latest") == MARIO
    assert all_presets().keys() == {"mario", "mario:v2"}
    assert (model_of("mario"), model_of("other")) == ("tiny", "other")
    assert remove_preset("mario")
    assert not remove_preset("mario")
    assert find_preset("mario") is None


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", ".a", "a:", "x" * 101, "ä"])
def test_a_name_that_could_be_a_path_or_none_is_refused(name):
    assert find_preset(name) is None
    assert not remove_preset(name)
    with pytest.raises(PresetError, match="cannot be a preset's name"):
        write_preset(name, MARIO)


def test_a_file_is_whole_or_not_there_and_its_users_alone(monkeypatch):
    write_preset("mario", MARIO)
    assert preset_file("mario").stat().st_mode & 0o777 == 0o600

    def full(_descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_preset("mario", Preset(from_="other"))
    assert find_preset("mario") == MARIO
    assert len(list(presets_folder().iterdir())) == 1
    with pytest.raises(PresetError, match="the limit is 1048576"):
        write_preset("long", Preset(from_="x", system="x" * 2**20))
    for number in range(1023):
        (presets_folder() / f"{number}.json").touch()
    with pytest.raises(PresetError, match="there are 1024 presets"):
        write_preset("another", MARIO)


def test_a_broken_file_is_named_and_the_others_are_found(caplog):
    write_preset("mario", MARIO)
    for text in (b"{", b"\xff", b"[]", b'{"from": "x", "colour": "red"}', b'{"from": ""}'):
        preset_file("bad").write_bytes(text)
        caplog.clear()
        assert all_presets() == all_presets() == {"mario": MARIO}
        assert len(caplog.messages) == 1, "once"
        assert caplog.messages[0].startswith(f"{preset_file('bad')} is no preset: ")
        with pytest.raises(PresetError, match="mend or delete it"):
            find_preset("bad")


def test_a_preset_of_a_preset_has_what_both_say_and_the_models_name():
    base = Preset(
        from_="tiny",
        system="A",
        adapter="/a",
        parameters=Parameters(temperature=0.5, top_k=3, stop="x"),
        messages=[PresetMessage("user", "Hi")],
    )
    found = Preset(from_="mario", template="T", parameters=Parameters(top_k=4)).over(base)
    assert (found.from_, found.system, found.template) == ("tiny", "A", "T")
    assert found.parameters == Parameters(temperature=0.5, top_k=4, stop="x")
    assert (found.adapter, found.messages) == (base.adapter, base.messages)
    assert Preset(from_="mario", system="").over(base).system == ""


def test_a_modelfile_is_read_in_any_case_and_order_with_quotes_and_comments():
    text = '''\ufeff# who
parameter   temperature 0.7\r
PARAMETER stop "User: "
PARAMETER stop """</s>
"""
  system """ You say "hi".
# no comment
"""
TEMPLATE {{ messages }} {# jinja #}
MESSAGE user\tWho are you?
message assistant """It's-a
me"""
PARAMETER top_k 40.0
PARAMETER num_predict -1
PARAMETER repeat_last_n 64
PARAMETER samplers dry
PARAMETER samplers top_k
ADAPTER ./a b
LICENSE "MIT"
LICENSE of mine
From  /models/a b.gguf'''
    assert read_modelfile(text) == Preset(
        from_="/models/a b.gguf",
        system=' You say "hi".\n# no comment\n',
        template="{{ messages }} {# jinja #}",
        adapter="./a b",
        messages=[
            PresetMessage("user", "Who are you?"),
            PresetMessage("assistant", "It's-a\nme"),
        ],
        parameters=Parameters(
            temperature=0.7,
            stop=["User: ", "</s>\n"],
            top_k=40,
            num_predict=-1,
            repeat_last_n=64,
            samplers=["dry", "top_k"],
        ),
        license="MIT\nof mine",
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "x has no line FROM; add one"),
        ("SYSTEM a", "x has no line FROM"),
        ("FROM a\nFROM b", "line 2: FROM stands twice"),
        ("\n\nFROMAGE a", "line 3: there is no instruction 'FROMAGE'; there are FROM, PARAMETER"),
        ("FROM", "line 1: FROM has no value"),
        ("PARAMETER mirostat 1", "line 1: there is no parameter 'mirostat'; .* num_ctx, num_pred"),
        ("PARAMETER num_gpu 1", "there is no parameter 'num_gpu'"),
        ("PARAMETER stop", "PARAMETER has no value"),
        ("PARAMETER seed 1\nPARAMETER seed 1", "line 2: PARAMETER seed stands twice"),
        ("PARAMETER temperature hot", "line 1: PARAMETER temperature is 'hot': Expected `float"),
        ("PARAMETER temperature nan", "Expected `float` >= 0.0"),
        ("PARAMETER top_p 1.5", "PARAMETER top_p is '1.5': Expected `float` <= 1.0"),
        ("PARAMETER top_k 1.5", "top_k is 1.5, it must be a whole number"),
        ("PARAMETER repeat_last_n -2", "repeat_last_n is .-2.: Expected .* >= -1"),
        ("PARAMETER repeat_last_n 2.5", "repeat_last_n is 2.5, it must be a whole number"),
        ("MESSAGE robot hi", "line 1: the role is 'robot', it must be system, user"),
        ("MESSAGE user", "MESSAGE has no value"),
        ('FROM a\nSYSTEM """b\nc', "line 2: its quotes are not closed"),
        (
            'FROM a\nTEMPLATE """\n{{ .System }}"""',
            "x, line 2: the template is one of Go's.*own te",
        ),
        ("TEMPLATE {{- range .Messages }}{{ end }}", "line 1: the template is one of Go's"),
        ("TEMPLATE {{ if .System }}{{ end }}", "line 1: the template is one of Go's"),
        ("TEMPLATE {{- range $i, $_ := .Messages }}", "line 1: the template is one of Go's"),
    ],
)
def test_what_is_not_known_is_refused_with_its_line(lines, says):
    with pytest.raises(PresetError, match=says):
        read_modelfile(lines, "x")


_TEXT = st.text(st.sampled_from("ab \n#{}%é'\""), min_size=1).filter(
    lambda text: '"""' not in f"{text}x"
)


@given(system=_TEXT, stop=st.lists(_TEXT, min_size=1), said=_TEXT, temperature=st.floats(0, 2))
def test_a_modelfile_that_is_shown_is_read_as_the_same_preset(system, stop, said, temperature):
    preset = Preset(
        from_="org/name:Q4_K_M",
        system=system,
        messages=[PresetMessage("assistant", said)],
        parameters=Parameters(temperature=temperature, stop=stop),
        license="MIT",
        adapter="/a b",
    )
    assert read_modelfile(modelfile(preset)) == preset
