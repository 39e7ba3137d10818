"""Models whose daemons the server starts and stops. The daemons are scripted processes."""

import contextlib
import functools
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from fake_engine import wait_until
from http_server import key_file, serving_models

from frontend.cli.http import http
from frontend.cli.options import UsageError
from frontend.errors import InvalidInput
from frontend.http.api_errors import ApiError
from frontend.http.on_demand import model as on_demand
from frontend.http.on_demand import while_starting
from frontend.http.on_demand.model import DaemonPool, OnDemandModel
from frontend.http.on_demand.options import OnDemandOptions, keep_alive_seconds
from frontend.http.served_models import ServedModels
from protocol.presets import Preset, write_preset

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("on_demand_engine.py")
HELLO = [{"role": "user", "content": "Hello"}]
LOOKS = ["/health", "/ready", "/metrics", "/v1/models", "/v1/requests", "/api/tags", "/api/ps"]


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Server:
    """A client of a server of scripted models, and what was started for it."""

    def __init__(self, url, folder):
        self.http = httpx.Client(base_url=url, timeout=30)
        self._folder = folder

    def pids(self, name):
        file = self._folder / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def complete(self, name, **more):
        body = {"model": name, "prompt": "Hello", "max_tokens": 3, **more}
        return self.http.post("/v1/completions", json=body)

    def completed_at_once(self, number, name):
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self.complete, [name] * number))

    def state(self, name):
        return self.http.get("/health").json()["engines"][name]

    @contextlib.contextmanager
    def streaming(self, name):
        body = {"model": name, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            yield chunks


@pytest.fixture
def serve(tmp_path):
    with contextlib.ExitStack() as servers:

        def start(*names, keep_alive="1h", **settings):
            command = (sys.executable, str(SCRIPT), str(tmp_path))
            pool = DaemonPool(OnDemandOptions(keep_alive=keep_alive, command=command))
            models = [OnDemandModel(name, pool) for name in names]
            served = ServedModels(models, functools.partial(OnDemandModel, pool=pool))
            return Server(servers.enter_context(serving_models(served, **settings)), tmp_path)

        yield start


def test_a_preset_is_listed_and_starts_its_model_which_serves_both(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write_preset("mario", Preset(from_="small", system="S"))
    server = serve("small", "other")
    listed = {card["id"]: card["parent"] for card in server.http.get("/v1/models").json()["data"]}
    assert listed == {"small": None, "other": None, "mario": "small"}
    assert server.state("small") == "stopped"
    body = {"model": "mario", "messages": HELLO, "max_tokens": 2, "return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len("system:S;user:Hello;")
    assert server.complete("small").is_success
    assert (len(server.pids("small")), server.pids("other")) == (1, [])
    write_preset("luigi", Preset(from_="fresh"))
    for name in ("mario", "luigi"):  # their models are fetched, and served
        assert server.http.post("/api/pull", json={"model": name}).text.endswith('success"}\n')
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == ["small", "other", "fresh", "luigi", "mario"]


def test_looking_starts_nothing_and_the_answers_are_true(serve):
    server = serve("small", "other")
    answers = {path: server.http.get(path) for path in LOOKS}
    assert {answer.status_code for answer in answers.values()} == {200}
    stopped = {"small": "stopped", "other": "stopped"}
    assert answers["/health"].json()["engines"] == stopped == answers["/ready"].json()["engines"]
    assert [card["id"] for card in answers["/v1/models"].json()["data"]] == ["small", "other"]
    assert answers["/api/ps"].json() == {"models": []}
    assert len(answers["/api/tags"].json()["models"]) == 2
    assert "up{" not in answers["/metrics"].text
    for path in ("/slots", "/props"):
        refused = server.http.get(path, params={"model": "small"})
        assert refused.status_code == 503
        assert "small is stopped; a request starts it" in refused.text
    assert server.complete("unknown").status_code == 404
    shown = server.http.post("/api/show", json={"model": "small:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "vision"]
    assert (shown["modelfile"], shown["parameters"]) == ("FROM small\n", "top_k 7")
    assert shown["model_info"]["fake.context_length"] == 512
    details = {
        "parent_model": "", "format": "gguf", "family": "fake", "families": ["fake"],
        "parameter_size": "1.0B", "quantization_level": "Q4_K",
    }  # fmt: skip
    (small, other) = server.http.get("/api/tags").json()["models"]
    assert small["details"] == shown["details"] == details
    assert (small["size"], other["size"], other["details"]["family"]) == (7, 0, "")
    assert server.pids("small") == server.pids("other") == []
    server = serve("absent")  # not fetched yet
    shown = server.http.post("/api/show", json={"model": "absent"}).json()
    assert (shown["capabilities"], shown["details"]["family"]) == ([], "")
    assert server.pids("absent") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--max-num-seqz", "4"], "Unknown option"),
        ([], "^'small' is neither a file or folder here nor a known name"),
    ],
)
def test_wrong_options_and_unknown_names_are_refused_before_any_daemon_is_started(options, words):
    with pytest.raises(UsageError, match=words):
        http(*options, model=["small"])


def test_all_who_ask_first_get_one_daemon_and_the_next_ones_the_same(serve):
    server = serve("small", "other")
    answers = [*server.completed_at_once(4, "small"), server.complete("small")]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(server.pids("small")) == 1
    assert server.pids("other") == []
    assert server.http.get("/ready").json()["engines"] == {"small": "ok", "other": "stopped"}
    assert 'up{address="",model_name="small"} 1.0' in server.http.get("/metrics").text


def test_an_idle_daemon_is_stopped_a_busy_one_is_not_and_the_next_request_starts_one(serve):
    server = serve("small", keep_alive="0.3")
    with server.streaming("small") as chunks:
        time.sleep(0.8)
        assert server.state("small") == "ok"
        assert "data: " in next(chunks)
    wait_until(lambda: server.state("small") == "stopped")
    (pid,) = server.pids("small")
    assert not is_running(pid)
    asked = {"model": "small", "input": "Hi", "max_output_tokens": 40, "background": True}
    answer = server.http.post("/v1/responses", json={**asked, "ignore_eos": True}).json()
    path = f"/v1/responses/{answer['id']}"  # busy, though nobody waits
    wait_until(lambda: server.http.get(path).json()["status"] == "incomplete")
    assert len(server.pids("small")) == 2


def test_daemons_end_with_the_server(tmp_path):
    pool = DaemonPool(OnDemandOptions(command=(sys.executable, str(SCRIPT), str(tmp_path))))
    models = ServedModels([OnDemandModel("small", pool)])
    with serving_models(models) as url:
        server = Server(url, tmp_path)
        assert server.complete("small").status_code == 200
    assert not is_running(*server.pids("small"))


def test_a_request_of_ollamas_says_how_long_its_model_stays(serve):
    server = serve("small")

    def generate(**fields):
        body = {"model": "small", "prompt": "Hello", "stream": False, **fields}
        answer = server.http.post("/api/generate", json={**body, "options": {"num_predict": 2}})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def expiry():
        (loaded,) = server.http.get("/api/ps").json()["models"]
        assert loaded["size"] > 10**6
        return datetime.fromisoformat(loaded["expires_at"]) - datetime.now(UTC)

    assert generate(prompt="", keep_alive=0)["done_reason"] == "unload"
    assert server.pids("small") == []
    assert generate()["done_reason"] == "length"
    assert timedelta(minutes=58) < expiry() <= timedelta(hours=1)
    generate(keep_alive="10m")
    generate()  # says nothing of it
    assert timedelta(minutes=9) < expiry() <= timedelta(minutes=10)
    for endless in (-1, "-1s", 10**30, "9" * 400 + "h", 1e300):
        generate(keep_alive="10m")
        generate(keep_alive=endless)
        assert expiry() > timedelta(days=36_500)
    generate(keep_alive=0)
    wait_until(lambda: server.state("small") == "stopped")
    assert server.http.get("/api/ps").json() == {"models": []}
    assert generate(prompt="")["done_reason"] == "load"
    assert timedelta(minutes=58) < expiry()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), (300, 300), ("1h30m", 5400), ("1.5s", 1.5), (0, 0), ("0s", 0), ("100ms", 0.1)],
)
def test_a_time_to_stay_is_read_as_ollama_reads_it(text, seconds):
    assert keep_alive_seconds(text) == pytest.approx(seconds)
    assert keep_alive_seconds(-1) == keep_alive_seconds("-5m") == float("inf")
    assert keep_alive_seconds(10**400) == keep_alive_seconds(4e8) == float("inf")
    for wrong in ("soon", "", "1e400", "5 m", float("nan")):
        with pytest.raises(InvalidInput, match=f"keep_alive is '?{wrong}"):
            keep_alive_seconds(wrong)


def test_a_key_that_is_no_admins_neither_stops_a_model_nor_keeps_it_for_longer():
    model = OnDemandModel("small", DaemonPool(OnDemandOptions(keep_alive="5m")))
    model.keep_alive(7200)
    for seconds in (0, 301, math.inf):
        with pytest.raises(ApiError, match="only an admin's key") as refused:
            model.keep_alive(seconds, by_admin=False)
        assert refused.value.status == 403
    model.keep_alive(60, by_admin=False)
    model.last_used_s = time.monotonic()
    assert model.expires_at > datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture
def room_for(monkeypatch, tmp_path):
    """A machine whose memory holds some of the scripted daemons."""

    def limit(num_daemons):
        daemon_bytes = 600 * 1024**2

        def available():
            pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
            return daemon_bytes * (num_daemons - sum(map(is_running, pids)))

        monkeypatch.setattr(on_demand, "available_memory_bytes", available)

    return limit


def test_the_least_recently_used_idle_daemon_makes_room(serve, room_for):
    room_for(2)
    server = serve("a", "b", "c")
    for name in ("a", "b", "a", "c"):
        assert server.complete(name).status_code == 200
    assert [server.state(name) for name in "abc"] == ["ok", "stopped", "ok"]


def test_without_an_idle_one_the_answer_is_503_with_the_numbers_and_nobody_is_hurt(serve, room_for):
    room_for(1)
    server = serve("a", "b")
    with server.streaming("a") as chunks:
        refused = server.complete("b")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        needed = 2 * 10**6 + 512 * 1024**2
        assert refused.json()["error"]["message"] == (
            f"b needs {needed:,} bytes of memory, 0 are available, and a cannot be stopped now; "
            "try again later, or free some"
        )
        assert "data: " in next(chunks)
    wait_until(lambda: server.complete("b").status_code == 200)
    assert server.state("a") == "stopped"


def test_what_a_running_daemon_may_still_take_for_its_cache_is_not_available(serve):
    server = serve("hoarder", "small")
    with server.streaming("hoarder"):
        refused = server.complete("small")
        assert refused.status_code == 503
        assert "0 are available, and hoarder cannot be stopped now" in refused.text
    wait_until(lambda: server.complete("small").status_code == 200)
    assert server.state("hoarder") == "stopped"


def test_a_daemon_that_finds_no_memory_is_tried_again_without_an_idle_one(serve):
    server = serve("a", "large")
    assert server.complete("a").status_code == 200
    assert server.complete("large").status_code == 200
    assert (server.state("a"), len(server.pids("large"))) == ("stopped", 2)


def test_a_failed_start_is_one_503_with_the_logs_last_line_for_each_who_waits(serve):
    server = serve("broken", "absent")
    answers = server.completed_at_once(3, "broken")
    assert [answer.status_code for answer in answers] == [503] * 3
    (text,) = {answer.json()["error"]["message"] for answer in answers}
    assert "ended with exit code 3" in text
    assert text.endswith("The last line of its log: engine-core: the file is cut short")
    assert "reading weights" not in text
    assert server.state("broken") == f"stopped: {text}"
    assert server.complete("broken").status_code == 200  # as its second start works
    refused = server.complete("absent")
    assert refused.status_code == 503
    assert "'absent' is no known name" in refused.json()["error"]["message"]


def test_a_daemon_that_dies_ends_its_streams_with_its_last_line_and_is_started_again(serve):
    server = serve("mortal")
    with server.streaming("mortal") as chunks:
        text = "".join(chunks)
    assert "exit code 7" in text
    assert "illegal instruction, as it were" in text
    wait_until(lambda: server.state("mortal") == "stopped")
    assert server.complete("mortal").status_code == 200
    assert len(server.pids("mortal")) == 2


@pytest.mark.parametrize(
    ("path", "body", "failed"),
    [
        ("chat/completions", {"messages": HELLO, "max_tokens": 3}, '"code":"engine_unavailable"'),
        ("responses", {"input": HELLO, "max_output_tokens": 16}, '"code":"engine_unavailable"'),
        ("messages", {"messages": HELLO, "max_tokens": 3}, "event: error\ndata: "),
    ],
)
def test_streams_that_wait_are_told_so_in_comments(serve, monkeypatch, path, body, failed):
    monkeypatch.setattr(while_starting, "BEGIN_S", 0.1)
    monkeypatch.setattr(while_starting, "COMMENT_S", 0.2)
    server = serve("slow", "broken")
    body["stream"] = True
    text = server.http.post(f"/v1/{path}", json={**body, "model": "slow"}).text
    comments = [line for line in text.splitlines() if line.startswith(":")]
    assert len(comments) > 2
    # on a busy machine the files are still being opened when the first ones are sent
    later = [line for line in comments[1:] if not line.startswith(": slow is downloading")]
    assert later[0].startswith(": slow is starting for ")
    assert any(line.startswith("data: ") for line in text.splitlines())
    refused = server.http.post(f"/v1/{path}", json={**body, "model": "broken"})
    assert refused.status_code == 200
    assert failed in refused.text
    assert "the file is cut short" in refused.text


def test_ollamas_pull_shows_the_download(serve):
    server = serve("small", "absent")
    lines = server.http.post("/api/pull", json={"model": "small"}).text.splitlines()
    assert lines[0] == '{"status":"pulling manifest"}'
    assert lines[1] == '{"status":"pulling it","completed":1000000,"total":2000000}'
    assert lines[-1] == '{"status":"success"}'
    (entry, _) = server.http.get("/api/tags").json()["models"]
    assert entry["size"] == 2 * 10**6
    refused = server.http.post("/api/pull", json={"model": "absent", "stream": False})
    assert refused.status_code == 503
    assert "'absent' is no known name" in refused.json()["error"]
    assert server.pids("small") == []


def test_a_model_that_is_pulled_is_served_from_then_on(serve):
    server = serve("small")
    refused = server.http.post("/api/pull", json={"model": "absent"}).text.splitlines()
    assert refused[-1].startswith(
        '{"error":"absent cannot be fetched: engine-core: \'absent\' is no'
    )
    for path in ("/etc/passwd", "../x", "~/x", "-h", "https://example.com/m.gguf", "tests"):
        answer = server.http.post("/api/pull", json={"model": path})
        assert answer.status_code == 404, answer.text
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["small"]
    for name in ("hf.co/org/new:Q8_0", "qwen3:0.6b", "qwen3:0.6b:latest"):
        lines = server.http.post("/api/pull", json={"model": name}).text.splitlines()
        assert lines[-1] == '{"status":"success"}'
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == ["small", "hf.co/org/new:Q8_0", "qwen3:0.6b"]
    assert server.complete("qwen3:0.6b").status_code == 200


def test_only_an_admin_may_have_another_model_pulled(serve, tmp_path):
    keys = [{"name": name, "key": name * 9, "admin": name == "ann"} for name in ("ann", "bob")]
    server = serve("small", api_key_file=key_file(tmp_path, *keys))

    def pull(key, name):
        headers = {"authorization": f"Bearer {key * 9}"}
        return server.http.post("/api/pull", json={"model": name}, headers=headers)

    assert "only an admin's key adds it" in pull("bob", "new").json()["error"]
    assert pull("bob", "small").status_code == 200
    assert '"success"' in pull("ann", "new").text
    assert pull("bob", "new").status_code == 200


async def test_a_model_is_closed_with_the_server_and_by_it():
    pool = DaemonPool(OnDemandOptions())
    served = ServedModels([OnDemandModel("small", pool)])
    await served.close()
    await served.close()
    assert pool.models == []


def test_a_client_that_leaves_while_the_model_starts_takes_nothing_with_it(serve):
    server = serve("slow", keep_alive="0.2")
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{server.http.base_url}/v1/completions",
            json={"model": "slow", "prompt": "Hello", "stream": True},
            timeout=0.3,
        )
    assert server.complete("slow").status_code == 200
    (pid,) = server.pids("slow")
    wait_until(lambda: not is_running(pid))
