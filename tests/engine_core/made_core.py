"""The engine's loop with the parts that every engine has, around what a test gives it."""

import time
from functools import partial

from engine_core.calls import BasicCalls
from engine_core.control import EngineControl
from engine_core.core import EngineCore
from engine_core.observers.live_view import LiveView
from engine_core.observers.scheduler_view import scheduler_view
from engine_core.server.clients import ClientRegistry
from engine_core.server.inbox import Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.request_reader import RequestReader
from engine_core.server.validation import RequestValidator
from protocol.outputs import Heartbeat


def limits(config, vocab_size, max_logprobs=5):
    return RequestValidator(
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        max_logprobs=max_logprobs,
        max_num_seqs=config.max_num_seqs,
        scheduling_policy=config.scheduling_policy,
    )


def mailboxes(
    transport,
    *,
    heartbeat_s=0.25,
    clock=time.monotonic,
    welcome=lambda hello: (Heartbeat(), []),  # any message will do
    **more,
):
    """An inbox and an outbox on a transport."""
    clients = ClientRegistry()
    outbox = Outbox(transport, clients, heartbeat_s=heartbeat_s, clock=clock, **more)
    inbox = Inbox(transport, clients, outbox, idle_wait_s=heartbeat_s, welcome=welcome, clock=clock)
    return inbox, outbox


def make_core(
    inbox,
    outbox,
    scheduler,
    executor,
    lifecycle,
    validator,
    *,
    eos_token_ids=(),
    host=None,
    on_weights=lambda version, fingerprint: None,
    parts=(),
    prompt_embeds=None,
    clock=time.monotonic,
):
    return EngineCore(
        inbox=inbox,
        outbox=outbox,
        scheduler=scheduler,
        executor=executor,
        lifecycle=lifecycle,
        reader=RequestReader(validator, tuple(eos_token_ids), prompt_embeds=prompt_embeds),
        parts=[
            BasicCalls(scheduler, outbox.clients, lifecycle),
            EngineControl(scheduler, lifecycle, host, on_weights),
            *parts,
            LiveView(partial(scheduler_view, scheduler)),
        ],
        clock=clock,
    )
