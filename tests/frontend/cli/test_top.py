"""`engine-client top` on a scripted engine: its screen (Textual's pilot), and its rates."""

import asyncio
import contextlib
import importlib
import time

import msgspec
import pytest
from fake_model import explanation, ids_of, statistics

from frontend.async_llm import AsyncLLM
from frontend.cli.app import run_command_line
from frontend.cli.engine_watch import EngineWatch
from protocol import calls
from protocol.errors import ErrorCode
from protocol.outputs import CallFailed
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

pytest.importorskip("textual")


def request_info(request_id, **changed):
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=ids_of("hello"),
        sampling_params=SamplingParams(max_tokens=100),
    )
    return msgspec.structs.replace(explanation(request), **changed)


A = request_info("id-a", num_output_tokens=10, tenant="lab/ann", num_prompt_tokens=5)
B = request_info("id-b", num_output_tokens=90, tenant="web", num_prompt_tokens=7)
C = request_info("id-c", num_output_tokens=50, tenant="lab/[red]\x1b", num_prompt_tokens=6)


def script(engine, *requests, **numbers):
    """The engine answers these requests, and statistics with these numbers; `asked` are the calls
    that it got."""
    asked = []

    def do(call):
        asked.append(type(call.call).__name__)
        match call.call:
            case calls.GetStatistics():
                changed = {"uptime_s": float(len(asked)), **numbers}
                return msgspec.structs.replace(statistics(len(requests)), **changed)
            case calls.GetRequests():
                return calls.RequestInfos(requests=[*requests], num_unfinished=len(requests) + 7)
            case calls.GetRequestInfo(request_id):
                return request_info(request_id, status="finished", finish_reason="length")

    engine.do = do
    return asked


@contextlib.asynccontextmanager
async def shown(engine, size=(120, 30), interval_s=0.2):
    """The screen for this engine. Not a fixture: Textual wants the test's own context."""
    from frontend.cli.top import TopApp

    async with (
        AsyncLLM(engine.address, reconnect_timeout_s=30) as llm,
        TopApp(EngineWatch(llm), interval_s).run_test(size=size) as pilot,
    ):
        await until(pilot, "requests ")
        yield pilot


def screen(pilot):
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot, *texts):
    """Waits until all of these stand on the screen."""
    await until_true(pilot, lambda: all(each in screen(pilot) for each in texts))


async def until_true(pilot, is_so, within_s=30):
    for _ in range(within_s * 20):
        await pilot.pause(0.05)
        if is_so():
            return
    raise AssertionError(screen(pilot))


def ids(pilot):
    words = (line.split() for line in screen(pilot).splitlines())
    return [word for line in words for word in line if word.startswith("id-")]


async def test_it_shows_steps_blocks_hits_latencies_and_each_requests_progress(start_engine):
    before = {"uptime_s": 1.0, "num_steps": 10, "num_prefill_tokens": 100}
    engine = start_engine()
    script(
        engine, A, B, num_waiting=3, max_wait_s=4.5, num_blocks=1000, num_blocks_in_use=250,
        num_blocks_cached=500, num_prompt_tokens=10, num_cached_prompt_tokens=4, **before,
    )  # fmt: skip
    async with shown(engine) as pilot:
        await until(
            pilot, "2 running, 3 waiting, the oldest for 4.5 s", "250 used, 750 free (500 cached)",
            "40% since the start", "10/100", "90/100", "lab/ann", "blocks", "first 2 of 9",
        )  # fmt: skip
        script(
            engine, A, msgspec.structs.replace(B, num_output_tokens=94), uptime_s=6.0, num_steps=14,
            num_prefill_tokens=400, num_decode_tokens=20, step_time_s=0.1, num_prompt_tokens=100,
            num_cached_prompt_tokens=50, num_first_tokens=2, queue_time_s=0.5, ttft_s=3.0,
            num_draft_tokens_by_method={"suffix": 40, "grammar": 2},
            num_accepted_tokens_by_method={"suffix": 10, "grammar": 2},
        )  # fmt: skip
        await until(
            pilot, "75.0 prefill + 5.0 decode tokens, 25 ms", "prefix hits 51%, 50% since",
            "first token 1,500 ms, of it in the queue 250 ms", "94/100",
            "suffix: 40 verified, 25% accepted, grammar: 2 verified, 100% accepted",
        )  # fmt: skip


async def test_keys_sort_filter_and_explain(start_engine):
    engine = start_engine()
    script(engine, A, B, C)
    async with shown(engine) as pilot:
        await until(pilot, "id-c")
        await until_true(pilot, lambda: ids(pilot) == ["id-a", "id-b", "id-c"])
        assert "lab/[red]?" in screen(pilot)
        await pilot.press("s", "s")  # by status, by progress
        await until_true(pilot, lambda: ids(pilot) == ["id-a", "id-c", "id-b"])
        await pilot.press("r")
        await until_true(pilot, lambda: ids(pilot) == ["id-b", "id-c", "id-a"])
        await pilot.press("slash", *"lab/")
        await until(pilot, "lab/")
        await until_true(pilot, lambda: ids(pilot) == ["id-c", "id-a"])
        await pilot.press("enter", "down", "enter")
        await until(pilot, "request_id", "id-a", "needs 9 blocks, 3 are free")
        await pilot.press("end")
        await until(pilot, "a needed a block")
        await pilot.press("escape")
        await until_true(pilot, lambda: "needs 9 blocks" not in screen(pilot))
        await pilot.press("escape")
        await until_true(pilot, lambda: ids(pilot) == ["id-b", "id-c", "id-a"])
        await pilot.press("q")
        assert pilot.app.return_code == 0


async def test_a_request_that_ends_while_it_is_explained_says_how(start_engine):
    engine = start_engine()
    script(engine, A)
    async with shown(engine) as pilot:
        await until(pilot, "id-a")
        await pilot.press("enter")
        await until(pilot, "needs 9 blocks")
        script(engine)
        await until(pilot, "status               finished")
        await pilot.press("ctrl+c")
        assert pilot.app.return_code == 0


async def test_an_idle_engine_is_asked_once_an_interval_and_a_busy_one_twice(start_engine):
    engine = start_engine()
    asked, since_s = script(engine), time.monotonic()
    async with shown(engine) as pilot:
        await until_true(pilot, lambda: len(asked) >= 4)
        assert len(asked) <= (time.monotonic() - since_s) / 0.2 + 2
        assert set(asked) == {"GetStatistics"}
        busy, since_s = script(engine, A), time.monotonic()
        await until_true(pilot, lambda: len(busy) >= 6)
        assert len(busy) <= 2 * ((time.monotonic() - since_s) / 0.2 + 2)
        assert abs(busy.count("GetStatistics") - busy.count("GetRequests")) <= 1


async def test_a_silent_engine_is_not_asked_again_and_one_that_is_lost_comes_back(
    start_engine, monkeypatch
):
    monkeypatch.setattr("frontend.cli.engine_watch._SILENT_S", 0.3)
    engine = start_engine()
    script(engine, A)
    async with shown(engine) as pilot:
        await until(pilot, "id-a")
        engine.mute = True
        await until(pilot, "no answer for ")
        engine.stop()
        await until(pilot, "the engine is gone, waiting for it")
        since_s = time.monotonic()
        asked = script(again := start_engine(), B, uptime_s=0.5)
        await until(pilot, "id-b")
        assert "gone" not in screen(pilot)
        assert len(asked) <= 2 * ((time.monotonic() - since_s) / 0.2 + 2)
        assert again.num_goodbyes == 0


async def test_a_client_that_may_not_see_requests_sees_the_rest(start_engine):
    engine = start_engine()
    script(engine, A)
    answer = engine.answer

    def refuse(call):
        if isinstance(call.call, calls.GetRequests):
            code = ErrorCode.PERMISSION_DENIED
            return CallFailed(call_id=call.call_id, code=code, message="it needs a key")
        return answer(call)

    engine.answer = refuse
    async with shown(engine) as pilot:
        await until(pilot, "1 running", "it needs a key")


async def test_two_refreshes_at_once_ask_once(start_engine):
    engine = start_engine()
    asked = script(engine, A)
    async with AsyncLLM(engine.address) as llm:
        watch = EngineWatch(llm)
        await asyncio.gather(watch.refresh(), watch.refresh())
        await watch.close()
    assert asked.count("GetStatistics") == 1


async def test_a_narrow_terminal_shows_all_numbers_and_the_first_columns(start_engine):
    engine = start_engine()
    script(engine, A, B)
    async with shown(engine, size=(40, 24)) as pilot:
        await until(pilot, "running", "tokens/s", "blocks", "latency", "10/100", "90/100")


def test_without_textual_it_names_the_command_that_installs_it(monkeypatch, capsys, address):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "frontend.cli.app.find_spec", lambda name: None if name == "textual" else find(name)
    )
    assert run_command_line(["top", "--address", address]) == 2
    err = capsys.readouterr().err
    assert "top needs Textual, the extra `tui`; install it with `pip install textual`" in err
    monkeypatch.undo()
    assert run_command_line(["top", "--address", address]) == 2
    assert "top needs a terminal" in capsys.readouterr().err
    assert run_command_line(["top", "--address", address, "--interval", "0.1"]) == 2
    assert "--interval is 0.1 s, it must be from 1" in capsys.readouterr().err
