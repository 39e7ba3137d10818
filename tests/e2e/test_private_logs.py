"""Nothing that a daemon writes holds a prompt or an answer, at the most detailed log level."""

import asyncio

import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import AsyncLLM, SamplingParams
from frontend.errors import EngineClientError
from protocol.codec import encode
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams as WireParams
from tests.e2e.test_watchdog import HANGS

pytestmark = pytest.mark.slow

MARK = "xyzzymark"


def written_by(daemon, *more):
    """All that is on disk and on standard error of it."""
    return "\n".join([daemon.log(), *(path.read_text(errors="replace") for path in more)])


async def test_marked_prompts_are_nowhere_in_what_the_daemon_writes(smollm2, tmp_path, monkeypatch):
    """Good ones, refused ones, broken ones, and one that is under way when the engine hangs."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flag = tmp_path / "hang"
    monkeypatch.setenv("TMPDIR", str(temporary))
    options = ["--num-blocks", 64, "--log-level", "debug", "--watchdog-timeout", 1]
    with running_daemon(smollm2, *options, program=("-c", HANGS, flag)) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.0)
            prompt = f"Say the word {MARK} again and again: {MARK} {MARK} {MARK}"
            tokens = llm.get_tokenizer().encode(prompt)
            marks = [MARK, str(tokens[4:])[1:-1], str(tokens[-4:])[1:-1]]
            async for output in llm.generate(prompt, params, "trace-7"):
                text = output.outputs[0].text
            assert text
            assert "request 'trace-7-" in daemon.log()
            async for _ in llm.chat([{"role": "user", "content": prompt}], params):
                pass
            wrong = [
                {"prompt": prompt * 1000, "sampling_params": params},
                {
                    "prompt": {"prompt_token_ids": [*tokens, 10**6]},
                    "sampling_params": params,
                },
            ]
            for arguments in wrong:
                with pytest.raises(EngineClientError):
                    async for _ in llm.generate(**arguments):
                        pass
            with RawClient(daemon.address) as raw:
                raw.socket.send(MARK.encode() * 100)
                raw.socket.send_multipart([b"\x95", MARK.encode()])
                params_of_wire = WireParams(max_tokens=4)
                for fields in (
                    {"prompt_token_ids": [*tokens, -1]},
                    {"prompt_token_ids": [*tokens, 10**6]},
                    {"prompt_token_ids": tokens, "output_token_ids": [10**6]},
                    {"prompt_token_ids": tokens, "cache_salt": MARK * 1000},
                    {"prompt_token_ids": [*tokens, MARK]},
                    {"prompt_token_ids": tokens * 4000},
                ):
                    message = EngineRequest(
                        request_id="r", sampling_params=params_of_wire, **fields
                    )
                    raw.socket.send(encode(message))
                raw.statistics()  # all of it has been read
            flag.touch()
            hanging = asyncio.ensure_future(anext(llm.generate(prompt, params)))
            while "stacks and numbers are in" not in daemon.log():
                await asyncio.sleep(0.05)
            reports = list(temporary.glob("engine-core-hang-*"))
            assert len(reports) == 1
            assert reports[0].stat().st_mode & 0o077 == 0
            written = written_by(daemon, *reports)
            hanging.cancel()
    assert "rejected request" in written or "invalid request" in written
    assert "# stacks" in written
    for mark in marks:
        assert mark not in written
    assert text not in written
