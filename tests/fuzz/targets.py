"""What is fuzzed: readers of bytes that others wrote, each with small valid inputs to begin with. A
target returns, or raises an error that is documented for its reader; anything else is a defect."""

import contextlib
import json
import logging
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fuzz.model_targets import gguf, safetensors, tokenizer
from tests.fuzz.mutation import Target

# ---------------------------------------------------------------------- the wire


def codec() -> Target:
    from protocol.codec import (
        binary_frame,
        decode_client_message,
        decode_engine_message,
        encode,
        request_id_of,
    )
    from protocol.errors import MalformedMessage, WireVersionMismatch
    from protocol.outputs import Welcome
    from tests.protocol.sample_messages import CLIENT_MESSAGES, ENGINE_MESSAGES

    def run(frames: list[bytes]) -> None:
        for frame in frames[:1]:
            request_id_of(frame)
            for decode in (decode_client_message, decode_engine_message):
                try:
                    message = decode(frame)
                    encode(message)
                    about = message.model.tokenizer if isinstance(message, Welcome) else None
                    if about is not None and about.tokenizer_json is not None:
                        binary_frame(about.tokenizer_json, frames[1:])
                except (MalformedMessage, WireVersionMismatch):
                    pass

    seeds = [[encode(message), b"{}"] for message in (*CLIENT_MESSAGES, *ENGINE_MESSAGES)]
    return Target(run, seeds)


def engine() -> Target:
    """Frames of one client through inbox, validation, loop and scheduler, in virtual time."""
    from engine_core.executor import InProcessExecutor
    from engine_core.kv_cache import KVCacheManager
    from engine_core.kv_cache.groups import KVCacheGroupSpec
    from engine_core.lifecycle import Lifecycle
    from engine_core.scheduler import ModelRunnerOutput, SchedulerConfig, SchedulerOutput
    from engine_core.startup.scheduler import build_scheduler
    from protocol.base import WIRE_VERSION
    from protocol.calls import Drain
    from protocol.codec import decode_engine_message, encode
    from protocol.requests import Call, EngineRequest, Hello
    from protocol.sampling import BeamSearchParams, SamplingParams
    from tests.engine_core.fake_host import NoSalt
    from tests.engine_core.made_core import limits, mailboxes, make_core
    from tests.engine_core.scheduler.paged_model import VOCAB, PagedModel
    from tests.protocol.sample_messages import CLIENT_MESSAGES

    class Wire:
        """Gives one message a pass, then drains; all that is sent must decode."""

        def __init__(self, frames: list[bytes]) -> None:
            self.frames = frames
            self.now_s = 0.0
            self.last = [HELLO, encode(Call(call_id=9, call=Drain()))]

        def clock(self) -> float:
            self.now_s += 0.001
            return self.now_s

        def wait(self, timeout_s: float) -> None:
            self.now_s += timeout_s

        def receive_all(self):
            if self.frames:
                yield b"client", [self.frames.pop(0)]
            elif self.last:
                yield b"operator", [self.last.pop(0)]

        def send(self, identity: bytes, frames: list[bytes]) -> None:
            decode_engine_message(frames[0])

    class Runner:
        max_steps_in_flight = 1

        def __init__(self) -> None:
            self.model = PagedModel((KVCacheGroupSpec(),), 24, 4, 8)
            self.model.salts = NoSalt()
            self.defects: list[Exception] = []

        def submit(self, plan: SchedulerOutput) -> None:
            self.plan = plan

        def collect(self) -> ModelRunnerOutput:
            try:
                return self.model.execute(self.plan)
            except Exception as error:
                self.defects.append(error)  # the loop takes it for a fault of the device
                raise

    HELLO = encode(Hello(wire_version=WIRE_VERSION))

    def run(frames: list[bytes]) -> None:
        wire = Wire([HELLO, *frames[:8]])
        inbox, outbox = mailboxes(wire, heartbeat_s=1.0, clock=wire.clock)
        runner = Runner()
        config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64)
        kv_cache = KVCacheManager(num_blocks=24, block_size=4, num_host_blocks=8)
        scheduler = build_scheduler(config, kv_cache)
        executor = InProcessExecutor(runner, clock=wire.clock)
        lifecycle = Lifecycle(drain_timeout_s=5.0, clock=wire.clock)
        core = make_core(
            inbox, outbox, scheduler, executor, lifecycle, limits(config, VOCAB, max_logprobs=3),
            clock=wire.clock,
        )  # fmt: skip
        core.run()
        core.close()
        scheduler.check()
        if runner.defects:
            raise runner.defects[0]

    def request(name: str, **fields) -> EngineRequest:
        params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **fields.pop("params", {})})
        return EngineRequest(
            request_id=name, prompt_token_ids=[1, 2, 3, 4, 0, 1], sampling_params=params, **fields
        )

    requests = [
        request("a"),
        request("b", params={"logprobs": 2, "seed": 3, "temperature": 1.0}),
        request("c", num_sequences=3, params={"temperature": 0.7}),
        request(
            "d", num_sequences=2, beam_search=BeamSearchParams(beam_width=2), params={}
        ),
        request("e", params={"stop_token_ids": (2,), "min_tokens": 2, "logit_bias": {1: 2.0}}),
        request("f", output_token_ids=[3, 1], cache_salt="salt", timeout_s=0.01),
    ]  # fmt: skip
    seeds = [[encode(each) for each in requests]]
    seeds += [[encode(message), encode(requests[0])] for message in CLIENT_MESSAGES]
    logging.disable(logging.CRITICAL)
    return Target(run, seeds)


# ---------------------------------------------------------------------- chat templates


_SNIPPETS = (
    "{% for m in messages %}", "{% endfor %}", "{% if m.content %}", "{% else %}", "{% endif %}",
    "{{ m.role }}", "{{ messages[0]['content'] }}", "{% set ns = namespace(a=1) %}",
    "{% set ns.a = ns.a + 1 %}",
    "{{ tools | tojson(indent=4) }}", "{% macro f(x) %}", "{% endmacro %}", "{{ f(f(1)) }}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%d') }}", "{% generation %}",
    "{% endgeneration %}", "{% break %}", "{{ ''.__class__ }}", "{{ x|attr('__init__') }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ dict(a=1).items() }}", "{{ range(9) | list }}",
    "{{ 'a' * 99 }}", "{{ [1, 2][::-1] }}", "{{ messages | selectattr('role') | list }}",
    "{{ cycler(1) }}", "{% include 'x' %}", "{%- call f(1) -%}", "{%- endcall -%}",
    "{% filter upper %}", "{% endfilter %}", "{% raw %}", "{{ 1 / 0 }}", "{{ m | string | trim }}",
    "{{ loop.index }}", "{{ messages | map(attribute='content') | join }}", "{{ 1 if 2 else 3 }}",
)  # fmt: skip


@contextlib.contextmanager
def limited(on_timeout: Callable[..., None]) -> Iterator[None]:
    """0.3 s of processor time and half a GiB more than there is, instead of a process's limits."""
    before = signal.signal(signal.SIGPROF, on_timeout)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), hard))
    signal.setitimer(signal.ITIMER_PROF, 0.3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def chat_template() -> Target:
    """A template and a conversation in JSON. What `limited` cuts off, the limits of the real
    process would cut off (test_template_process.py)."""
    from frontend.errors import ChatTemplateError
    from frontend.text import template_sandbox
    from frontend.text.chat_template import _plain, checked_messages
    from tests.frontend.text.template_samples import PART_TEMPLATES, TEMPLATES

    class CutOff(BaseException):
        pass

    def cut_off(*_: object) -> None:
        raise CutOff

    def limit(**options: object) -> None:
        with contextlib.suppress(ChatTemplateError, CutOff, MemoryError), limited(cut_off):
            template_sandbox.render(**options)

    def run(parts: list[bytes]) -> None:
        source, chat = (*parts, b"", b"")[:2]
        template = source.decode("utf-8", "replace")
        try:
            conversation = json.loads(chat)
            messages = checked_messages(conversation)
            tools = _plain(conversation) if "tools" in template else None
        except (ValueError, RecursionError):  # render_chat says more of these
            return
        limit(
            template=template,
            messages=messages,
            add_generation_prompt=len(source) % 2 == 0,
            continue_final_message=len(chat) % 2 == 0,
            tools=tools,
            special_tokens={"bos_token": "<s>"},
            variables={},
        )

    chats = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "So", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
    ]  # fmt: skip
    templates = [*TEMPLATES.values(), *PART_TEMPLATES.values(), "".join(_SNIPPETS[:5])]
    seeds = [[t.encode(), json.dumps(chat).encode()] for t in templates for chat in chats]
    words = tuple(snippet.encode() for snippet in _SNIPPETS)
    return Target(run, seeds, words)


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": codec,
    "engine": engine,
    "gguf": gguf,
    "safetensors": safetensors,
    "tokenizer": tokenizer,
    "chat_template": chat_template,
}
