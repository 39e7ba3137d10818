"""Adapters on a running daemon: named at the start, loaded and unloaded while it serves, in one
batch, and behind its death."""

import asyncio
import shutil

import pytest
from adapter_folders import greedy_tokens, make_adapter, merged_model
from daemons import run_to_exit, running_daemon

from frontend import AsyncLLM, LoRARequest, RequestOutputKind, SamplingParams
from frontend.errors import CallRefused, InvalidInput, RequestRejected
from protocol.errors import ErrorCode

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 45))
COUNT = 12
OPTIONS = ("--num-blocks", 128)


def params(**changes):
    given = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**given | {"output_kind": RequestOutputKind.FINAL_ONLY} | changes)


async def last_output(llm, **options):
    sampling = params(**options.pop("changes", {}))
    stream = llm.generate({"prompt_token_ids": PROMPT}, sampling, **options)
    return [output async for output in stream][-1]


async def tokens_of(llm, **options):
    return (await last_output(llm, **options)).outputs[0].token_ids


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(root / name, tiny_llama, seed=seed, rank=rank)
        for name, seed, rank in (("ann", 1, 4), ("bob", 2, 3), ("cid", 3, 33))
    }


@pytest.fixture(scope="module")
def expected(tiny_llama, folders):
    """By adapter; None: without."""
    found = {None: greedy_tokens(merged_model(tiny_llama), PROMPT, COUNT)}
    for name, folder in folders.items():
        found[name] = greedy_tokens(merged_model(tiny_llama, folder), PROMPT, COUNT)
    assert len(set(map(tuple, found.values()))) == 4
    return found


async def test_requests_with_several_adapters_and_none_get_the_tokens_of_merged_models(
    tiny_llama, folders, expected
):
    """Proves S025, S206, S207: three adapters take turns in two slots."""
    named = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    with running_daemon(tiny_llama, *OPTIONS, *named, "--max-loras", 2) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            assert llm.adapters == ["ann", "bob", "cid"]
            names = [*expected] * 3
            found = await asyncio.gather(*(tokens_of(llm, adapter=name) for name in names))
            assert found == [expected[name] for name in names]
            # whole blocks of the prompt are found again, each under its own adapter only
            again = await last_output(llm, adapter="bob")
            assert again.num_cached_tokens == 32
            assert again.outputs[0].token_ids == expected["bob"]
            with pytest.raises(InvalidInput, match="no adapter 'dora', there are: ann, bob, cid"):
                await tokens_of(llm, adapter="dora")
            with pytest.raises(CallRefused, match="--adapter-dir"):
                await llm.load_adapter("new", str(folders["ann"]))
            long = params(max_tokens=400, output_kind=RequestOutputKind.DELTA)
            stream = llm.generate({"prompt_token_ids": PROMPT}, long, adapter="cid")
            await anext(stream)
            numbers = await llm.statistics()
            assert (numbers.max_loras, numbers.num_running_by_adapter) == (2, {"cid": 1})
            await stream.aclose()


async def test_adapters_come_and_go_while_it_serves(tiny_llama, folders, expected, tmp_path):
    """Proves S206. A changed adapter of the same name shares no blocks with the one before."""
    allowed = tmp_path / "allowed"
    for name in ("ann", "bob"):
        shutil.copytree(folders[name], allowed / name)
    (allowed / "away").symlink_to(folders["cid"])
    options = (*OPTIONS, "--adapter-dir", allowed, "--max-loras", 1)
    with running_daemon(tiny_llama, *options) as daemon:
        async with AsyncLLM(daemon.address) as llm, AsyncLLM(daemon.address) as other:
            assert await llm.load_adapter("x", "ann") == ["x"]
            assert await tokens_of(llm, adapter="x") == expected["ann"]
            assert await tokens_of(other, lora_request=LoRARequest("x", 1)) == expected["ann"]
            for path, why in (
                ("nowhere", "there is no adapter"),
                ("../" + allowed.name + "x", "not in the folder"),
                ("away", "not in the folder"),
                (str(folders["ann"]), "not in the folder"),
            ):
                with pytest.raises(CallRefused, match=why) as refused:
                    await llm.load_adapter("y", path)
                assert refused.value.code is ErrorCode.ADAPTER_REFUSED
            with pytest.raises(CallRefused, match="is there already"):
                await llm.load_adapter("x", "bob")
            long = params(max_tokens=150, output_kind=RequestOutputKind.CUMULATIVE)
            running = llm.generate({"prompt_token_ids": PROMPT}, long, adapter="x")
            await anext(running)
            assert await llm.load_adapter("x", "bob", load_inplace=True) == ["x"]
            changed = await last_output(other, lora_request=LoRARequest("x", 1))
            assert (changed.outputs[0].token_ids, changed.num_cached_tokens) == (expected["bob"], 0)
            last = [output async for output in running][-1]
            assert last.outputs[0].token_ids[:COUNT] == expected["ann"]
            assert await llm.unload_adapter("x") == []
            while other.adapters:
                await asyncio.sleep(0.01)
            with pytest.raises(InvalidInput, match="there are: none"):
                await tokens_of(other, adapter="x")
            # vLLM's request loads what the engine does not know
            request = LoRARequest("z", 7, str(allowed / "bob"))
            assert await tokens_of(other, lora_request=request) == expected["bob"]
            assert await tokens_of(llm) == expected[None]
            # the files change behind its back, and its slot is given to another
            (allowed / "bob" / "adapter_model.safetensors").write_bytes(b"garbage")
            await llm.load_adapter("w", "ann")
            assert await tokens_of(llm, adapter="w") == expected["ann"]
            failed = await last_output(other, adapter="z")
            assert failed.outputs[0].finish_reason == "error"
            assert "adapter_model.safetensors" in failed.outputs[0].detail
            assert await tokens_of(llm, adapter="w") == expected["ann"]


async def test_a_stream_goes_on_behind_the_daemons_death_with_its_adapter_and_no_other(
    tiny_llama, folders
):
    def options(name):
        return (*OPTIONS, f"--adapter=x={folders[name]}")

    async def killed_on_the_way(llm, daemon, second):
        """The tokens of a stream whose daemon dies after 20 of them and comes back with that."""
        tokens, restarted = [], None
        long = params(max_tokens=120, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate({"prompt_token_ids": PROMPT}, long, adapter="x"):
            tokens += output.outputs[0].token_ids
            if restarted is None and len(tokens) >= 20:
                daemon.kill()
                start = asyncio.to_thread(daemon.start, options=options(second))
                restarted = asyncio.create_task(start)
        return tokens

    with running_daemon(tiny_llama, *options("ann")) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            whole = await tokens_of(llm, adapter="x", changes={"max_tokens": 120})
            assert await killed_on_the_way(llm, daemon, "ann") == whole
            with pytest.raises(RequestRejected, match="other weights") as refused:
                await killed_on_the_way(llm, daemon, "bob")
            assert refused.value.code is ErrorCode.UNKNOWN_ADAPTER


def test_an_adapter_that_cannot_be_served_ends_the_start_with_its_reason(tiny_llama):
    ended = run_to_exit("--model", tiny_llama, "--adapter", f"x={tiny_llama}")
    assert ended.returncode == 3
    why = ended.stderr.splitlines()[-1]
    assert "--adapter x: " in why and "has no adapter_config.json" in why
