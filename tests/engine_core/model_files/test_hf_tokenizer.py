"""A folder's tokenizer, as one JSON, encodes as transformers' AutoTokenizer on that folder."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine_core.model_files import BrokenModelFile
from engine_core.model_files.hf_folder import resolve_eos_token_ids
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer, tokenizer_files

_TEXTS = ["", "Hello, world", "a  b\n\n c<eos>d <x> é😀", "<bos>twice", "[tool]call[tool]"]


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello there. the tool calls the world"], trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=trained(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_encodes_as_transformers(folder: Path) -> None:
    files = read_folder_tokenizer(folder)
    assert files is not None
    ours = Tokenizer.from_str(files.tokenizer_json.decode())
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in [*_TEXTS, "long " * 50]:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_saved_tokenizer_is_read_as_it_is(folder: Path) -> None:
    files = read_folder_tokenizer(folder)
    assert files is not None
    assert files.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    assert files.chat_template == "{{ messages }}"
    assert_encodes_as_transformers(folder)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_flags_of_the_config_change_the_ends_no_more_than_in_transformers(
    folder: Path, bos: bool, eos: bool
) -> None:
    change_config(folder, add_bos_token=bos, add_eos_token=eos)
    assert_encodes_as_transformers(folder)


def test_ends_of_the_json_are_kept(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert_encodes_as_transformers(folder)
    change_config(folder, add_bos_token=True)
    assert_encodes_as_transformers(folder)


def test_truncation_and_padding_of_the_json_do_not_cut_prompts(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert_encodes_as_transformers(folder)


def test_tokens_only_in_the_config_are_added(folder: Path) -> None:
    added = {"content": "<x>", "lstrip": True, "rstrip": False, "normalized": False}
    decoder = {"300": added | {"single_word": False, "special": True}}
    change_config(folder, added_tokens_decoder=decoder, extra_special_tokens=["[tool]"])
    assert_encodes_as_transformers(folder)


def test_special_tokens_may_be_objects_and_live_in_either_file(folder: Path) -> None:
    change_config(folder, bos_token=None, eos_token={"content": "<eos>", "special": True})
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<bos>"}}')
    files = read_folder_tokenizer(folder)
    assert files is not None
    assert files.special_tokens["bos_token"] == "<bos>"
    assert files.special_tokens["eos_token"] == "<eos>"
    assert resolve_eos_token_ids([{}], lambda: files) == (1,)


def test_chat_template_places(folder: Path) -> None:
    def template() -> str | None:
        files = read_folder_tokenizer(folder)
        assert files is not None
        return files.chat_template

    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change_config(folder, chat_template=None)
    assert template() is None
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template() == "json"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    change_config(folder, chat_template=named)
    assert template() == "d"
    (folder / "chat_template.jinja").write_text("jinja")
    assert template() == "jinja"


def by_list(folder: Path) -> None:
    entries = [{"name": name, "template": source} for name, source in NAMED.items()]
    change_config(folder, chat_template=entries)


def by_files(folder: Path) -> None:
    change_config(folder, chat_template="not this one")
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])


def by_processor(folder: Path) -> None:
    change_config(folder, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": NAMED}))


NAMED = {"tool_use": "{{ tools }}", "default": "{{ messages }}", "rag": "{{ documents }}"}


@pytest.mark.parametrize("write", [by_list, by_files, by_processor])
def test_chat_templates_are_found_by_name(folder: Path, write: Callable[[Path], None]) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    before = tokenizer_files(folder)
    write(folder)
    files = read_folder_tokenizer(folder)
    assert files is not None
    assert files.chat_template == NAMED["default"]
    assert files.named_chat_templates == {name: NAMED[name] for name in ("tool_use", "rag")}
    if write is by_files:
        assert len(tokenizer_files(folder)) == len(before) + 3, "a part of the fingerprint"
    if write is not by_processor:
        assert AutoTokenizer.from_pretrained(folder).chat_template == NAMED


def test_vocabulary_and_merges_are_converted_by_transformers(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    merges = [" ".join(merge) for merge in document["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    change_config(folder, tokenizer_class="GPT2Tokenizer")
    assert_encodes_as_transformers(folder)


def test_a_folder_of_tekken_alone_has_the_template_of_mistral_common(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """If that is installed, and all the same is read without it."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]"]
    vocabulary = [bytes([n]) for n in range(256)] + [b"he", b"ll"]
    document = {
        "config": {"pattern": r"\p{L}+|\s+|.", "default_vocab_size": 264,
                   "default_num_special_tokens": len(control), "version": "v11"},
        "vocab": [{"rank": n, "token_bytes": base64.b64encode(each).decode()}
                  for n, each in enumerate(vocabulary)],
        "special_tokens": [{"rank": n, "token_str": each, "is_control": True}
                           for n, each in enumerate(control)],
    }  # fmt: skip
    (tmp_path / "tekken.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text('{"model_type": "voxtral"}')
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    files = read_folder_tokenizer(tmp_path)
    assert files is not None and files.chat_template is None
    assert "pip install engine-core[mistral]" in caplog.text
    made = Tokenizer.from_str(files.tokenizer_json.decode())
    assert made.encode("[INST]hell").ids == [3, 6 + 256, 6 + 257]
    maker = SimpleNamespace(
        convert_tokenizer_to_chat_template=lambda file, **options: f"{file.name} {options}"
    )
    name = "mistral_common.integrations.chat_templates"
    for package in ("mistral_common", "mistral_common.integrations"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(chat_templates=maker))
    files = read_folder_tokenizer(tmp_path)
    assert files is not None
    assert files.chat_template == "tekken.json {'use_special_token_variables': False}"


def test_no_tokenizer_is_none_and_a_broken_one_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenModelFile, match=r"tokenizer\.json.*--tokenizer"):
        read_folder_tokenizer(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read_folder_tokenizer(empty) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"added_tokens_decoder": 5}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"3x": {"content": "<n>"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<n>"}}}, "added_tokens_decoder"),
        ({"additional_special_tokens": 5}, "special tokens are int"),
        ({"eos_token": "\ud800"}, "not valid JSON"),
    ],
)
def test_a_config_of_wrong_types_is_named(folder: Path, change, words) -> None:
    """Found by fuzzing."""
    change_config(folder, **change)
    with pytest.raises(BrokenModelFile, match=words):
        read_folder_tokenizer(folder)


def test_a_config_that_nests_without_end_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(BrokenModelFile, match="nests too deeply"):
        read_folder_tokenizer(folder)


def test_named_templates_may_have_odd_names(folder: Path) -> None:
    change_config(folder, chat_template=[{"name": {}, "template": "a"}, {"name": 5}])
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    files = read_folder_tokenizer(folder)
    assert files is not None
    assert files.chat_template == "a"


def test_a_token_id_beyond_all_vocabularies_is_refused_before_it_is_counted_up_to(folder: Path):
    """Found by fuzzing: the vocabulary was written for minutes."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["far"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(document))
    change_config(folder, additional_special_tokens=["<new>"])
    with pytest.raises(BrokenModelFile, match="id 2147483648, the limit is 16777216"):
        read_folder_tokenizer(folder)


def test_a_tokenizer_that_makes_the_library_panic_is_named(folder: Path):
    """Found by fuzzing: a merge shorter than the prefix of words' later parts."""
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = {"a": 0, "b": 1, "ab": 2}
    document["model"] |= {"continuing_subword_prefix": "##", "vocab": vocab, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BrokenModelFile, match=r"tokenizer\.json is not a tokenizer.*--tokenizer"):
        read_folder_tokenizer(folder)
