"""Responses that are kept, or run in the background, before a scripted engine."""

import functools
import itertools
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import wait_until
from http_server import key_file, serving
from response_events import events_of, kinds_of, prompt_of, respond

from frontend.errors import InvalidInput
from frontend.http.responses.store import ResponseStore, StoredResponse


def stored(size=10):
    return StoredResponse(b"x" * size, b"[]")


async def test_the_store_keeps_within_its_count_and_bytes(tmp_path):
    for folder in (None, tmp_path / "kept"):
        store = ResponseStore(max_responses=3, max_bytes=190, folder=folder)
        ids = [f"resp_{number:048x}" for number in range(6)]
        for each in ids[:4]:
            await store.put(each, None, stored())
            await store.get(ids[1], None)
        assert [await store.get(each, None) is None for each in ids[:4]] == [True] + [False] * 3
        await store.put(ids[4], None, stored(150))
        assert [await store.get(each, None) is None for each in ids[1:4]] == [True, True, False]
        await store.put(ids[5], None, stored(300))
        assert await store.get(ids[5], None) is None
        assert await store.get(ids[4], None) == stored(150)
        assert await store.delete(ids[4], None)
        assert not await store.delete(ids[4], None)
        store.close()


async def test_what_is_read_stays_longer_and_is_its_owners():
    store = ResponseStore(max_responses=3)
    for name in "abc":
        await store.put(name, "ann", stored())
    assert await store.get("a", "ann") is not None
    assert await store.get("b", "bob") is None, "nor does a stranger's question keep it"
    await store.put("d", "ann", stored())
    assert [await store.get(name, "ann") is None for name in "abcd"] == [False, True, False, False]


@pytest.mark.parametrize("size", [1, 60])
async def test_whoever_stores_much_drops_nothing_of_others(size):
    store = ResponseStore(max_responses=4, max_bytes=400)
    await store.put("bobs", "bob", stored(size))
    for number in range(9):
        await store.put(f"anns {number}", "ann", stored(size))
    assert await store.get("bobs", "bob") is not None
    assert await store.get("bobs", "ann") is None
    assert await store.get("anns 8", "ann") is not None
    assert await store.get("anns 0", "ann") is None


async def test_a_folder_is_found_again_by_the_times_of_use(tmp_path):
    first = ResponseStore(max_responses=3, folder=tmp_path)
    ids = [f"resp_{number:048x}" for number in range(4)]
    for each in ids[:3]:
        await first.put(each, "ann", stored())
        time.sleep(0.01)
    await first.get(ids[0], "ann")
    owner = next(each for each in tmp_path.iterdir() if each.is_dir())
    torn, foreign = owner / "resp_1.part", owner / "notes"
    torn.touch()
    foreign.touch()
    with pytest.raises(InvalidInput, match="another server uses it"):
        ResponseStore(folder=tmp_path)
    first.close()
    again = ResponseStore(max_responses=3, folder=tmp_path)
    assert (torn.exists(), foreign.exists()) == (False, True)
    assert owner.stat().st_mode & 0o077 == 0
    await again.put(ids[3], "bob", stored())
    assert [await again.get(each, "ann") is None for each in ids[:3]] == [False, True, False]
    (owner / ids[0]).write_bytes(b"damaged")
    assert await again.get(ids[0], "ann") is None
    shutil.rmtree(owner)
    owner.touch()  # no folder: as a full disk
    await again.put(ids[1], "ann", stored())
    assert await again.get(ids[1], "ann") is None
    again.close()


def test_a_response_survives_a_restart_in_a_folder(engine, tmp_path):
    entries = [
        {"name": name, "key": f"key-of-{name}", "max_concurrent_requests": 1}
        for name in ("ann", "bob")
    ]
    keys = key_file(tmp_path, *entries)
    made = None
    for _ in range(2):
        with serving(engine.address, api_key_file=keys, responses_dir=tmp_path / "kept") as url:
            ann, bob = (
                httpx.Client(base_url=url, headers={"authorization": f"Bearer key-of-{name}"})
                for name in ("ann", "bob")
            )
            made = made or respond(ann, max_output_tokens=2).json()
            path = f"/v1/responses/{made['id']}"
            assert ann.get(path).json() == made
            assert bob.get(path).status_code == bob.delete(path).status_code == 404
            assert bob.post(f"{path}/cancel").status_code == 404
            more = respond(ann, "More", max_output_tokens=2, previous_response_id=made["id"])
            assert more.status_code == 200
            assert respond(ann, "x", background=True, ignore_eos=True).status_code == 200
            assert respond(ann, "x", background=True).status_code == 429
            assert respond(bob, "x", background=True, max_output_tokens=2).status_code == 200


def test_items_are_listed_referred_to_and_deleted(serve_text):
    http = serve_text("Ja.")
    first = respond(http, "Eins").json()
    given = [{"role": "user", "content": name, "id": name} for name in "abc"]
    second = respond(http, given, previous_response_id=first["id"]).json()
    path = f"/v1/responses/{second['id']}"
    page = http.get(f"{path}/input_items", params={"limit": 2}).json()
    assert [item["id"] for item in page["data"]] == ["c", "b"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "c"}]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("c", "b", True)
    rest = {"order": "asc", "after": "a", "include": "message.input_image.image_url"}
    page = http.get(f"{path}/input_items", params=rest).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["b", "c"], False)
    for wrong in ({"order": "x"}, {"limit": "-1"}, {"after": "z"}, {"colour": "red"}):
        error = http.get(f"{path}/input_items", params=wrong)
        assert (error.status_code, error.json()["error"]["param"]) == (400, *wrong)
    (message,) = second["output"]
    refers = [{"type": "item_reference", "id": message["id"]}, {"role": "user", "content": "Zwei"}]
    assert respond(http, refers).status_code == 200
    assert prompt_of(http) == "assistant:Ja.;user:Zwei;"
    assert http.post(f"{path}/cancel").json()["error"]["param"] == "response_id"
    assert http.get(path, params={"stream": "true"}).json()["error"]["param"] == "stream"
    assert http.delete(path).json() == {"id": second["id"], "object": "response", "deleted": True}
    assert http.delete(path).status_code == http.get(path).status_code == 404
    assert respond(http, refers).json()["error"]["param"] == "input[0].id"


def test_a_response_in_the_background_goes_on_without_its_reader(serve_text):
    http = serve_text("Ja, gewiss.")
    queued = respond(http, background=True).json()
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    path = f"/v1/responses/{queued['id']}"
    wait_until(lambda: http.get(path).json()["status"] == "completed")
    assert http.get(path).json()["output"][0]["content"][0]["text"] == "Ja, gewiss."
    assert http.post(f"{path}/cancel").json()["status"] == "completed"
    failed = respond(http, "x" * 600, background=True).json()
    path = f"/v1/responses/{failed['id']}"
    wait_until(lambda: http.get(path).json()["status"] == "failed")
    assert http.get(path).json()["error"]["code"] == "context_length_exceeded"


def test_a_stream_in_the_background_is_resumed_and_cancelled(serve):
    http = serve(step_s=0.005)
    asked = {"background": True, "stream": True, "max_output_tokens": 30}
    with http.stream("POST", "/v1/responses", json={"input": "Hi", **asked}) as response:
        chunks = response.iter_text()
        response_id = next(chunks).partition('"id":"')[2].partition('"')[0]
    path = f"/v1/responses/{response_id}"
    with ThreadPoolExecutor() as pool:  # two readers while it runs
        read = functools.partial(http.get, path, params={"stream": "true"})
        events, same = map(events_of, pool.map(lambda _: read(), range(2)))
    assert events == same
    assert kinds_of(events)[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert events[-1]["type"] == "response.incomplete"
    assert http.get(path).json() == events[-1]["response"]
    rest = http.get(path, params={"stream": "true", "starting_after": 20}).text
    assert rest.count("event: ") == len(events) - 21
    long = respond(http, background=True, max_output_tokens=400).json()
    path = f"/v1/responses/{long['id']}"
    wait_until(lambda: http.get(path).json()["status"] == "in_progress")
    cancelled = http.post(f"{path}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert http.get(path).json() == http.post(f"{path}/cancel").json() == cancelled
    wait_until(lambda: not http.engine.num_live)
    running = respond(http, background=True, max_output_tokens=400).json()
    assert http.delete(f"/v1/responses/{running['id']}").json()["deleted"]
    wait_until(lambda: not http.engine.num_live)


def test_a_stream_in_the_background_ends_when_nobody_reads_it_for_its_time(serve):
    http = serve(step_s=0.01)
    asked = {"input": "Hi", "background": True, "background_options": {"unread_timeout": 0.3}}
    assert respond(http, **asked).json()["error"]["param"] == "background_options.unread_timeout"
    asked |= {"stream": True, "max_output_tokens": 200}
    with http.stream("POST", "/v1/responses", json=asked) as response:
        response_id = next(response.iter_text()).partition('"id":"')[2].partition('"')[0]
    path, read = f"/v1/responses/{response_id}", {"stream": "true"}
    time.sleep(0.15)
    with http.stream("GET", path, params=read) as response:  # longer than its time without one
        began_s = time.monotonic()
        for _ in response.iter_text():
            if time.monotonic() - began_s > 0.6:
                break
    assert http.get(path).json()["status"] == "in_progress"
    wait_until(lambda: http.get(path).json()["status"] == "cancelled")
    wait_until(lambda: not http.engine.num_live)
    assert "output_text.delta" in http.get(path, params=read).text


def test_the_oldest_turns_of_a_long_conversation_are_left_out(serve_text):
    http = serve_text("Ja.")
    turns = [
        [{"role": "user", "content": f"{n}" + "x" * 90}, {"role": "assistant", "content": "Gut."}]
        for n in range(8)
    ]
    items = [
        {"role": "system", "content": "S"},
        *itertools.chain(*turns),
        {"role": "user", "content": "?"},
    ]
    assert respond(http, items).json()["error"]["code"] == "context_length_exceeded"
    answer = respond(http, items, truncation="auto").json()
    assert (answer["truncation"], answer["status"]) == ("auto", "completed")
    prompt = prompt_of(http)
    assert prompt.startswith("system:S;")
    assert prompt.endswith(";assistant:Gut.;user:?;")
    assert "user:0x" not in prompt and "user:7x" in prompt
    assert 200 < answer["usage"]["input_tokens"] < 512
    alone = respond(http, "x" * 600, truncation="auto")
    assert alone.json()["error"]["code"] == "context_length_exceeded"
