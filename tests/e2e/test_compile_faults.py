"""A structured output that ends the engine: it is found, and no request of others is blamed."""

import asyncio

import pytest
from daemons import running_daemon

from frontend import AsyncLLM, SamplingParams
from frontend.errors import RequestRejected
from protocol.errors import ErrorCode
from tests.engine_core.structured_output.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

PLANTED = """
import os, signal, time
from engine_core.structured_output.compiler import GrammarCompiler

def compile(self, asked, is_begun):
    is_begun()
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)

GrammarCompiler.compile = compile
from engine_core.cli import main
main()
"""


async def last(llm, first, **options):
    options = {"max_tokens": 300, "temperature": 1.0, "seed": 7, "ignore_eos": True} | options
    prompt = {"prompt_token_ids": [first, *range(5, 30)]}
    output = [output async for output in llm.generate(prompt, SamplingParams(**options))][-1]
    return output.outputs[0].token_ids


async def test_a_grammar_that_ends_the_engine_is_refused_and_streams_beside_it_end_well(tmp_path):
    model = write_tiny_model(tmp_path)
    options = ("--num-blocks", 128, "--supervise")
    with running_daemon(model, *options, program=("-c", PLANTED)) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = [await last(llm, first) for first in range(1, 5)]
            others = [asyncio.create_task(last(llm, first)) for first in range(1, 5)]
            asked = {"ignore_eos": False, "structured_outputs": {"regex": "a+"}}
            for first in (7, 8):  # the content is refused, not this prompt alone
                with pytest.raises(RequestRejected) as error:
                    await asyncio.wait_for(last(llm, first, **asked), 120)
                assert error.value.code is ErrorCode.KILLED_ENGINE
                assert "compiled structured_outputs.regex, at last alone" in str(error.value)
            assert await asyncio.wait_for(asyncio.gather(*others), 60) == expected
        assert daemon.log().count("the engine died (killed by SIGSEGV)") == 3
