"""Files and batches, before the scripted engine."""

import contextlib
import json
import time

import httpx
import pytest
from fake_engine import wait_until
from http_server import TEMPLATE, key_file, serving

from frontend.batch import jobs
from frontend.batch.files import FileStore
from frontend.errors import InvalidInput

KEYS = {name: {"authorization": f"Bearer {name}-key"} for name in ("ann", "bob")}


def line(custom_id, url="/v1/completions", **body):
    body = {"prompt": "Hello", "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@contextlib.contextmanager
def client_of(engine, **settings):
    with serving(engine.address, **settings) as url, httpx.Client(base_url=url) as http:
        yield http


def upload(http, *lines, **asked):
    file = ("lines.jsonl", "\n".join(lines).encode())
    response = http.post("/v1/files", files={"file": file}, data={"purpose": "batch"}, **asked)
    assert response.status_code == 200, response.text
    return response.json()


def begin(http, *lines, endpoint="/v1/completions", **asked):
    body = {
        "input_file_id": upload(http, *lines, **asked)["id"],
        "endpoint": endpoint,
        "completion_window": "24h",
        "metadata": {"why": "a test"},
    }
    response = http.post("/v1/batches", json=body, **asked)
    assert response.status_code == 200, response.text
    return response.json()


def batch_once(http, batch, is_it, **asked):
    deadline = time.monotonic() + 10
    while not is_it(batch := http.get(f"/v1/batches/{batch['id']}", **asked).json()):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def ended(batch):
    return batch["status"] in jobs.ENDED


def lines_of(http, file_id, **asked):
    found = http.get(f"/v1/files/{file_id}/content", **asked)
    return {each["custom_id"]: each for each in map(json.loads, found.text.splitlines())}


def test_a_batch_is_its_owners_and_stands_behind_interactive_requests(start_engine, tmp_path):
    engine = start_engine(chat_template=TEMPLATE, model_fields={"has_priorities": True})
    keys = [{"name": name, "key": f"{name}-key", "max_concurrent_requests": 1} for name in KEYS]
    with client_of(engine, api_key_file=key_file(tmp_path, *keys)) as http:
        ann, bob = ({"headers": KEYS[name]} for name in KEYS)
        lines = [line("a"), line("b", max_tokens=-1), line("c", priority=7, n=2)]
        batch = begin(http, *lines, **ann)
        assert batch["object"] == "batch"
        assert batch["expires_at"] == batch["created_at"] + 24 * 3600
        batch = batch_once(http, batch, ended, **ann)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert batch["metadata"] == {"why": "a test"}
        times = [batch[f"{each}_at"] for each in ("in_progress", "finalizing", "completed")]
        assert times == sorted(times)
        found = lines_of(http, batch["output_file_id"], **ann)
        assert list(found) == ["a", "c"]
        assert len(found["c"]["response"]["body"]["choices"]) == 2
        assert found["a"]["error"] is None
        (refused,) = lines_of(http, batch["error_file_id"], **ann).values()
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
        assert sorted(each.priority for each in engine.requests) == [7, 1000]
        assert {each.tenant for each in engine.requests} == {"ann"}

        for path in (
            f"files/{batch['input_file_id']}",
            f"files/{batch['output_file_id']}/content",
            f"batches/{batch['id']}",
        ):
            assert http.get(f"/v1/{path}", **bob).status_code == 404
        assert http.post(f"/v1/batches/{batch['id']}/cancel", **bob).status_code == 404
        assert http.get("/v1/files", **bob).json()["data"] == []
        assert http.get("/v1/batches", **bob).json()["data"] == []
        own = http.get("/v1/files?purpose=batch_output&limit=1", **ann).json()
        assert (len(own["data"]), own["has_more"]) == (1, True)
        rest = http.get(f"/v1/files?purpose=batch_output&after={own['last_id']}", **ann).json()
        outputs = {batch["output_file_id"], batch["error_file_id"]}
        assert {own["first_id"], rest["first_id"]} == outputs
        assert [each["id"] for each in http.get("/v1/batches", **ann).json()["data"]] == [
            batch["id"]
        ]
        deleted = http.delete(f"/v1/files/{batch['input_file_id']}", **ann).json()
        assert deleted["deleted"] is True
        assert http.get(f"/v1/files/{batch['input_file_id']}", **ann).status_code == 404


def test_a_server_that_is_started_again_goes_on_with_what_is_not_answered(start_engine, tmp_path):
    engine = start_engine(step_s=0.01)
    lines = [line(f"r{number}", max_tokens=1 + 40 * (number % 2)) for number in range(10)]
    with client_of(engine, files_dir=tmp_path) as http:
        batch = begin(http, *lines)
        batch_once(http, batch, lambda it: it["request_counts"]["completed"] >= 5)
        refused = http.delete(f"/v1/files/{batch['input_file_id']}")
        assert refused.status_code == 409
        assert batch["id"] in refused.json()["error"]["message"]
    assert len(engine.requests) == 10
    with client_of(engine, files_dir=tmp_path) as http:
        batch = batch_once(http, batch, ended)
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        found = lines_of(http, batch["output_file_id"])
    assert list(found) == [f"r{number}" for number in range(10)]
    assert len(engine.requests) == 15
    assert not list(tmp_path.glob("all/*.parts"))


def test_a_batch_that_is_cancelled_or_expires_gives_what_is_there(start_engine, monkeypatch):
    engine = start_engine(step_s=0.01)
    lines = [line("short", max_tokens=1), line("long", max_tokens=4000)]
    with client_of(engine) as http:
        batch = batch_once(http, begin(http, *lines), lambda it: it["request_counts"]["completed"])
        assert http.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
        batch = batch_once(http, batch, ended)
        assert batch["status"] == "cancelled"
        assert batch["cancelling_at"] <= batch["cancelled_at"]
        assert list(lines_of(http, batch["output_file_id"])) == ["short"]
        assert batch["error_file_id"] is None
        again = http.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code == 409

        monkeypatch.setattr(jobs, "WINDOW_S", 1)
        batch = batch_once(http, begin(http, *lines), ended)
        assert batch["status"] == "expired"
        expired = lines_of(http, batch["error_file_id"])["long"]
        assert expired["error"]["code"] == "batch_expired"
        wait_until(lambda: len(engine.aborted) == 2)


@pytest.mark.parametrize(
    ("lines", "told", "where"),
    [
        ([line("a"), line("a")], "lines 1 and 2 have the same custom_id 'a'", None),
        ([line("a"), line("b", "/v1/embeddings")], "url of line 2 is /v1/embeddings", 2),
        ([line("a"), "{"], "line 2 is not valid JSON", 2),
        ([line("a", stream=True)], "stream is not supported in a batch", 1),
        ([line("a", background=True)], "background is not supported in a batch", 1),
        (["", " "], "no lines", None),
    ],
)
def test_a_batch_with_a_line_that_is_wrong_fails_before_any_is_asked(http, lines, told, where):
    batch = batch_once(http, begin(http, *lines), ended)
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert told in error["message"]
    assert "/" not in error["message"].replace("/v1/", "")
    assert error["line"] == where


def test_the_official_client_drives_a_batch(engine):
    openai = pytest.importorskip("openai")
    with serving(engine.address) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
        file = sdk.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
        assert sdk.files.retrieve(file.id) == file
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while (batch := sdk.batches.retrieve(batch.id)).status != "completed":
            time.sleep(0.01)
        assert batch.request_counts.completed == 1
        (answer,) = sdk.files.content(batch.output_file_id).text.splitlines()
        assert json.loads(answer)["custom_id"] == "a"
        assert [each.id for each in sdk.batches.list(limit=1)] == [batch.id]
        assert {each.id for each in sdk.files.list(limit=1)} == {file.id, batch.output_file_id}
        assert sdk.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
            sdk.batches.cancel(batch.id)


def test_files_and_batches_are_refused_by_name(http_of_refusals):
    http = http_of_refusals
    file = {"file": ("x", b"{}")}

    def told(response, status):
        assert response.status_code == status, response.text
        return response.json()["error"]["message"]

    assert 'use "batch"' in told(http.post("/v1/files", files=file), 400)
    form = {"purpose": "batch", "expires_after": "1"}
    assert "expires_after" in told(http.post("/v1/files", files=file, data=form), 400)
    assert "multipart" in told(http.post("/v1/files", json={}), 400)
    assert "limit is '0'" in told(http.get("/v1/files?limit=0"), 400)
    assert "'x' is not supported" in told(http.get("/v1/batches?x=1"), 400)
    for name in ("file-0", "..", "batch_" + "0" * 24):
        assert http.get(f"/v1/files/{name}").status_code == 404
    asked = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert "upload it first" in told(http.post("/v1/batches", json=asked), 400)
    other = {**asked, "endpoint": "/v1/images"}
    assert "/v1/images" in told(http.post("/v1/batches", json=other), 400)
    other = {**asked, "completion_window": "1h"}
    assert "completion_window" in told(http.post("/v1/batches", json=other), 400)


def test_batches_that_ended_are_forgotten_one_day(http, monkeypatch):
    monkeypatch.setattr(jobs, "_MOST_KEPT", 1)
    ids = [batch_once(http, begin(http, line("a")), ended)["id"] for _ in range(3)]
    left = http.get("/v1/batches?limit=9").json()["data"]
    assert {each["id"] for each in left} == {*ids[1:]}


def test_files_have_a_bound_and_one_server(engine, tmp_path):
    with client_of(engine, files_dir=tmp_path, max_files_size=10) as http:
        file = {"file": ("x", b"12345678901")}
        response = http.post("/v1/files", files=file, data={"purpose": "batch"})
        assert response.status_code == 413
        assert "--max-files-size" in response.json()["error"]["message"]
        with pytest.raises(InvalidInput, match="another server"):
            FileStore(tmp_path, 10)
