"""What tenants of a real daemon find in its prefix cache, with --isolate-tenants and without."""

import pytest
from daemons import running_daemon

from frontend import AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 45))
"""Two full blocks and a half."""


async def cached_tokens(llm, prompt=PROMPT, n=1, **options):
    """Of one request: tokens found in the cache, of those in host memory; and its outputs."""
    params = SamplingParams(n=n, max_tokens=4, seed=3, ignore_eos=True, detokenize=False)
    async for output in llm.generate({"prompt_token_ids": prompt}, params, **options):
        last = output
    lookup = (await llm.request_info(last.metrics.engine_request_id)).cache_lookup
    return lookup.num_tokens, lookup.num_host_tokens, [each.token_ids for each in last.outputs]


async def test_without_isolation_tenants_share_and_with_it_they_do_not(tiny_llama):
    answers = []
    for options, shared in (((), 32), (("--isolate-tenants",), 0)):
        with running_daemon(tiny_llama, "--num-blocks", 64, *options) as daemon:
            async with AsyncLLM(daemon.address) as one, AsyncLLM(daemon.address) as other:
                first = await cached_tokens(one, tenant="a")
                assert first[0] == 0
                assert (await cached_tokens(other, tenant="b"))[0] == shared
                assert (await cached_tokens(other, tenant="a"))[0] == 32, "it is the same tenant"
                # without a tenant each client is one
                assert (await cached_tokens(one))[0] == shared
                assert (await cached_tokens(other))[0] == shared
                assert (await cached_tokens(other))[0] == 32
                before = (await one.statistics()).num_cached_prompt_tokens
                tokens = (await cached_tokens(one, tenant="c", n=3))[2]
                assert (await one.statistics()).num_cached_prompt_tokens - before == shared
                answers.append((first[2], tokens))
    assert answers[0] == answers[1], "isolation changes no token"


async def test_host_memory_is_isolated_too_and_shared_within_a_tenant(tiny_llama):
    options = ["--isolate-tenants", "--num-blocks", 17, "--host-cache-memory", "64MiB"]
    with running_daemon(tiny_llama, *options, "--max-model-len", 128) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            assert (await cached_tokens(llm, tenant="a"))[0] == 0
            for start in range(50, 90, 2):  # evict it from the device
                await cached_tokens(llm, [start % 90 + 1] * 100, tenant=f"t{start}")
            assert (await cached_tokens(llm, tenant="b"))[:2] == (0, 0)
            assert (await cached_tokens(llm, tenant="a"))[:2] == (32, 32)


async def test_what_is_kept_on_disk_is_isolated_too(tiny_llama, tmp_path):
    prompt = [number % 80 + 5 for number in range(150)]  # short ones are not kept
    options = ["--isolate-tenants", "--num-blocks", 64, "--prefix-cache-dir", tmp_path / "kept"]
    options += ["--prefix-cache-disk", "64MiB"]
    with running_daemon(tiny_llama, *options) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            await cached_tokens(llm, prompt, tenant="a")
            await cached_tokens(llm, prompt)
        assert daemon.stop() == 0
    with running_daemon(tiny_llama, *options) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            assert (await cached_tokens(llm, prompt, tenant="b"))[0] == 0
            assert (await cached_tokens(llm, prompt))[0] == 0, "another client of no name"
            assert (await cached_tokens(llm, prompt, tenant="a"))[0] == 144
