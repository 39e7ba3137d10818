"""Prompts computed by one daemon and gone on with by another: the tokens of one daemon, whatever
becomes of the blocks on their way."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import AsyncLLM, SamplingParams
from frontend.sampling_params import StructuredOutputsParams
from protocol.calls import ResetPrefixCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Proxy:
    """Passes bytes between engines; `answers` sees those that come back, and may change them, hold
    them up, or return None to cut the connection."""

    def __init__(self):
        self.answers = lambda data: data
        self.target = None
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                host, port = self.target.removeprefix("tcp://").split(":")
                try:
                    other = socket.create_connection((host, int(port)))
                except OSError:
                    one.close()
                    continue
                for ends in (
                    (one, other, lambda data: data),
                    (other, one, lambda data: self.answers(data)),
                ):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    @staticmethod
    def _pass(source, to, change):
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and (data := change(data)) is not None:
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()


@pytest.fixture
def tiny_gemma(tmp_path):
    """The shape of a model with windows of 40 tokens in half of its layers."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 40,
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": 96,
        "bos_token_id": 0,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def flipping(place):
    """One byte of what passes is another, however it is cut into pieces."""
    passed = 0

    def flip(data):
        nonlocal passed
        start, passed = passed, passed + len(data)
        if not start <= place < passed:
            return data
        index = place - start
        return data[:index] + bytes([data[index] ^ 0xA5]) + data[index + 1 :]

    return flip


class Pair:
    """A prefill engine, a proxy before it, and a decode engine; a raw client of each."""

    def __init__(self, stack, config, *options):
        self.proxy = stack.enter_context(contextlib.closing(Proxy()))
        self.options = ("--load-format", "dummy", "--model-config", config, *options)
        self.options += ("--num-blocks", 300, "--num-threads", 1)
        self.stack = stack
        self.start_prefill()
        self.decode_daemon = stack.enter_context(
            running_daemon(
                None,
                *self.options,
                *("--disaggregation-mode", "decode", "--kv-transfer-timeout", 6),
                *("--kv-transfer-source", self.proxy.address),
            )
        )
        self.decode = stack.enter_context(contextlib.closing(RawClient(self.decode_daemon.address)))
        self._numbers = iter(range(1000))

    def start_prefill(self):
        bind = "tcp://127.0.0.1:0" if self.proxy.target is None else self.proxy.target
        self.daemon = self.stack.enter_context(
            running_daemon(
                None, *self.options, "--disaggregation-mode", "prefill", "--kv-transfer-bind", bind
            )
        )
        self.prefill = self.stack.enter_context(contextlib.closing(RawClient(self.daemon.address)))
        self.proxy.target = self.prefill.welcome.disaggregation.kv_address

    def answer(self, client, prompt, *, max_tokens=12, **fields):
        """Tokens, and the bytes of their log-probabilities."""
        name = f"r{next(self._numbers)}"
        client.request(name, prompt, fields=fields, max_tokens=max_tokens, logprobs=2)
        tokens, ended = client.collect(name, timeout_s=120)[name]
        assert ended.finish_reason == "length"
        assert client.logprobs[name]
        return tokens, client.logprobs[name]

    def handed_over(self, prompt, *, between=None, other=None):
        """The tokens of the prefill engine alone, those of both, blocks that came, and why others
        did not. `between`: a call for the first; `other`: fields for the second alone."""
        before = self.decode.statistics()
        expected = self.answer(self.prefill, prompt)
        if between is not None:
            self.prefill.call(between)
        fields = {"kv_source": self.proxy.address} | (other or {})
        tokens = self.answer(self.decode, prompt, **fields)
        after = self.decode.statistics()
        failed = {
            why: count - before.num_kv_blocks_failed.get(why, 0)
            for why, count in after.num_kv_blocks_failed.items()
        }
        received = after.num_kv_blocks_received - before.num_kv_blocks_received
        return expected, tokens, received, {why for why, count in failed.items() if count}


def prompt(number, length=250):
    return [5 + (number * 13 + place * place * 7 + place * number) % 90 for place in range(length)]


def test_the_tokens_are_those_of_one_engine_whatever_the_way_does(tiny_gemma):
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, tiny_gemma, "--kv-cache-dtype", "int8")
        proxy = pair.proxy

        # 15 blocks of the full layers; 40 positions back are 3 or 4 blocks of those with windows
        expected, tokens, received, failed = pair.handed_over(prompt(0))
        assert tokens == expected
        assert 15 < received <= 15 + 4
        assert not failed
        computed = pair.decode.statistics().num_prefill_tokens
        assert computed == 10
        assert pair.handed_over(prompt(0))[2] == 0, "it has them"

        # another salt: other blocks
        pair.answer(pair.prefill, prompt(1), cache_salt="red")
        expected, tokens, received, failed = pair.handed_over(prompt(1), other={"cache_salt": "b"})
        assert (tokens, received, bool(failed)) == (expected, 0, True)

        # blocks that are gone
        forget = ResetPrefixCache()
        expected, tokens, received, failed = pair.handed_over(prompt(2), between=forget)
        assert (tokens, received, bool(failed)) == (expected, 0, True)

        for number, way, reasons in (
            (3, flipping(30_000), {"corrupt"}),  # in the middle of a block
            (4, lambda data: None, {"lost"}),
            (5, lambda data: time.sleep(0.6) or data[:1], {"late", "lost", "corrupt"}),
        ):
            time.sleep(1.1)  # an engine that was lost is left alone for a second
            proxy.answers = way
            expected, tokens, _, failed = pair.handed_over(prompt(number))
            assert tokens == expected
            assert failed
            assert failed <= reasons
        proxy.answers = lambda data: data

        # killed while blocks are on their way
        time.sleep(1.1)
        expected = pair.answer(pair.prefill, prompt(6))
        proxy.answers = lambda data: pair.daemon.process.kill()
        tokens = pair.answer(pair.decode, prompt(6), kv_source=proxy.address)
        assert tokens == expected
        proxy.answers = lambda data: data

        # and back: blocks come again
        pair.daemon.process.wait()
        pair.start_prefill()
        time.sleep(1.1)
        expected, tokens, received, _ = pair.handed_over(prompt(7))
        assert tokens == expected
        assert received > 15
        numbers = pair.decode.statistics()
        assert numbers.num_running == numbers.num_waiting == numbers.num_blocks_in_use == 0

        # refused by name
        pair.prefill.request("no", prompt(8), fields={"kv_source": proxy.address})
        assert "kv_source" in pair.prefill.collect("no")["no"][1].message


JSON = StructuredOutputsParams(
    json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "n": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "seed": 9, "structured_outputs": JSON},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


async def test_a_client_of_both_gets_one_engines_tokens_also_when_the_second_is_killed(smollm2):
    options = ("--num-blocks", 200, "--num-threads", 1)

    async def answer(llm, number, more):
        text = " ".join(f"{number}: the {place}th fox jumps." for place in range(25))
        params = SamplingParams(max_tokens=24, **more)
        outputs = [output async for output in llm.generate(text, params)]
        assert [output.finished for output in outputs].count(True) == 1
        parts = outputs[-1].outputs
        return [(part.token_ids, part.logprobs, part.finish_reason) for part in parts]

    async def answers(llm):
        return await asyncio.gather(*(answer(llm, *each) for each in enumerate(KINDS)))

    with contextlib.ExitStack() as stack:
        mode = ("--disaggregation-mode", "prefill", "--kv-transfer-bind", "tcp://127.0.0.1:0")
        prefill = stack.enter_context(running_daemon(smollm2, *options, *mode))
        async with AsyncLLM(prefill.address) as alone:
            expected = await answers(alone)
            source = alone.session.welcome.disaggregation.kv_address
        mode = ("--disaggregation-mode", "decode", "--kv-transfer-source", source)
        decode = stack.enter_context(running_daemon(smollm2, *options, *mode))
        async with AsyncLLM([prefill.address, decode.address]) as llm:
            while not all(engine.session.is_connected for engine in llm.engines):
                await asyncio.sleep(0.01)
            assert await answers(llm) == expected
            sent, received = [await engine.statistics() for engine in llm.engines]
            assert sent.num_kv_blocks_sent >= received.num_kv_blocks_received >= 15
            assert received.num_prefill_tokens < sent.num_prefill_tokens

            before = received.num_generated_tokens
            tasks = asyncio.create_task(answers(llm))
            while (await llm.engines[1].statistics()).num_generated_tokens < before + 10:
                await asyncio.sleep(0.01)
            decode.process.kill()
            assert await asyncio.wait_for(tasks, 120) == expected
