"""The daemon of `scripts/bench.py fleet`: real but for its model runner, which sleeps."""

from pathlib import Path

import pytest
from daemons import running_daemon

from frontend import AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "scripts" / "benchmarks" / "sleeping_engine.py"


async def test_steps_take_as_long_as_they_are_said_to_and_prompts_are_found(smollm2, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.02,0.001")
    with running_daemon(smollm2, "--num-blocks", 64, program=(PROGRAM,)) as daemon:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        async with AsyncLLM(daemon.address) as llm:
            cached = []
            for _ in range(2):
                stream = llm.generate({"prompt_token_ids": [*range(500, 600)]}, params)
                final = [output async for output in stream][-1]
                assert len(final.outputs[0].token_ids) == 10
                cached.append(final.num_cached_tokens)
            numbers = await llm.statistics()
    assert cached == [0, 96]
    assert numbers.model_time_s >= 20 * 0.02 + (100 + 4 + 18) * 0.001
