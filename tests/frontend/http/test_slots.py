"""Slots of llama.cpp's API before a scripted engine: their tokens, saved and restored."""

import hashlib

import pytest
from fake_model import expected_text, ids_of
from http_server import key_file

from frontend.errors import InvalidInput
from frontend.http.settings import ServerSettings


def ask(http, prompt, **body):
    body = {"prompt": prompt, "temperature": 0, "n_predict": 4, **body}
    answer = http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def act(http, action, slot=0, name="a.bin", **more):
    path = f"/slots/{slot}?action={action}"
    return http.post(path, json=None if action == "erase" else {"filename": name}, **more)


def done(http, action, slot=0, name="a.bin"):
    answer = act(http, action, slot, name)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(answer):
    return answer.status_code, answer.json()["error"]["message"]


def test_a_saved_slot_is_computed_again_by_a_new_server(serve, tmp_path):
    settings = {"slot_save_path": tmp_path}
    http = serve("small", settings=settings)
    ask(http, "Unnamed")
    ask(http, "Hello", id_slot=3, stream=True)
    found = done(http, "save", 3)
    # the last token of the answer was not read by a step: it has no key and no value
    tokens = [*ids_of("Hello"), *ids_of(expected_text("Hello", 4))[:-1]]
    file = tmp_path / "a.bin"
    assert found.pop("timings")["save_ms"] > 0
    assert found == {
        "id_slot": 3, "filename": "a.bin", "n_saved": len(tokens),
        "n_written": file.stat().st_size,
    }  # fmt: skip
    assert (file.stat().st_mode & 0o777, [*tmp_path.iterdir()]) == (0o600, [file])
    assert done(http, "save", name="b.bin")["n_saved"] == len("Unnamed") + 3
    assert done(http, "erase", 3) == {"id_slot": 3, "n_erased": len(tokens)}
    assert done(http, "erase", 3)["n_erased"] == 0
    assert refusal(act(http, "save", 3))[0] == 400

    http = serve("small", settings=settings)
    found = done(http, "restore", 1)
    assert found.pop("timings")["restore_ms"] > 0
    assert found == {
        "id_slot": 1, "filename": "a.bin", "n_restored": len(tokens),
        "n_read": file.stat().st_size,
    }  # fmt: skip
    (request,) = http.engine.requests
    assert (request.prompt_token_ids, request.sampling_params.max_tokens) == (tokens, 1)
    assert done(http, "save", 1, "c.bin")["n_saved"] == len(tokens)
    assert (tmp_path / "c.bin").read_bytes() == file.read_bytes()


def test_what_is_no_slot_or_another_models_is_refused_by_name(serve, tmp_path):
    http = serve("small", settings={"slot_save_path": tmp_path})
    ask(http, "Hello", n_predict=0)
    assert done(http, "save")["n_saved"] == 5
    (tmp_path / "other.bin").write_bytes(b"ggsq" + bytes(10**6))
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    for name, words in (
        ("other.bin", "no slot that was saved here"),
        ("absent.bin", "No such file"),
        ("link.bin", "symbolic links"),
    ):
        status, message = refusal(act(http, "restore", name=name))
        assert (status, words in message, name in message) == (400, True, True), message
    for name in ("", "../a", "a/b", "a\\b", ".", "..", "a.", " a", "a ", "a:b", "x" * 256, "a\n"):
        assert "invalid filename" in refusal(act(http, "save", name=name))[1]
    for slot, action, words in (("-1", "save", "slot ID"), ("x", "save", "slot ID"),
                                ("0", "drop", "'drop'")):  # fmt: skip
        status, message = refusal(act(http, action, slot))
        assert (status, words in message) == (400, True)
    body = {"filename": "a.bin", "nope": 1}
    assert "nope" in refusal(http.post("/slots/0?action=save", json=body))[1]
    for other, words in ((serve("large", settings={"slot_save_path": tmp_path}), "model small"),
                         (serve("small", settings={"slot_save_path": tmp_path},
                                more_tokens=["<x>"]), "tokenizer")):  # fmt: skip
        status, message = refusal(act(other, "restore"))
        assert (status, words in message) == (400, True), message
        assert other.engine.requests == []
    with pytest.raises(InvalidInput, match="--slot-save-path"):
        ServerSettings(slot_save_path=tmp_path / "absent").check()


def test_slots_are_bounded_and_each_key_has_its_own(serve, tmp_path):
    folder, keys = tmp_path / "slots", [{"name": name, "key": name * 8} for name in ("ann", "bob")]
    folder.mkdir()
    settings = {"slot_save_path": folder, "api_key_file": key_file(tmp_path, *keys)}
    http = serve(settings=settings, max_num_seqs=2)
    ann, bob = ({"headers": {"Authorization": f"Bearer {each['key']}"}} for each in keys)
    for client, slot in ((ann, 0), (ann, 1)):
        body = {"prompt": "Hello", "n_predict": 2, "id_slot": slot}
        assert http.post("/completion", json=body, **client).is_success
    assert act(http, "save", 0, **ann).is_success
    assert "slot 0 is empty" in refusal(act(http, "save", 0, **bob))[1]
    assert "No such file" in refusal(act(http, "restore", 0, **bob))[1]
    assert [each.parent for each in folder.glob("*/*")] == [
        folder / hashlib.sha256(b"ann").hexdigest()
    ]
    assert http.post("/completion", json={"prompt": "Hi", "n_predict": 2}, **bob).is_success
    assert "slot 0 is empty" in refusal(act(http, "save", 0, **ann))[1]
    assert act(http, "save", 1, **ann).is_success
