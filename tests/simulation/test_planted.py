"""Defects that this engine once had, planted again one by one: the simulation finds each. How many
schedules that takes from the first one on: `python -m tests.simulation.test_planted`."""

import asyncio
import contextlib
from unittest import mock

import msgspec
import pytest

import frontend.engine.link as link_module
import frontend.engine.session as session_module
import frontend.engine.transport as transport_module
from engine_core.kv_cache import KVCacheManager
from engine_core.kv_cache.copies import PendingCopies
from engine_core.scheduler import Scheduler
from engine_core.scheduler.request import Request
from engine_core.scheduler.rules.queue_limits import QueueLimits
from engine_core.server import inbox as inbox_module
from frontend.engine.session import EngineSession
from frontend.engine.transport import ZmqTransport
from tests.simulation.schedule import run_schedule
from tests.simulation.settings import Violation, only
from tests.simulation.test_schedules import largest_gap_of_floods

_MOST_SCHEDULES = 1500


def unread_messages_are_lost():
    """libzmq drops them at the end of a connection, and only some are read then."""
    receive = ZmqTransport._receive

    def at_most_64(self, max_messages):
        return receive(self, min(max_messages, 64))

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(transport_module, "_NEVER_MS", -1))
    stack.enter_context(mock.patch.object(ZmqTransport, "_receive", at_most_64))
    return stack


def again_reaches_the_caller():
    suppress = lambda *_errors: contextlib.nullcontext()  # noqa: E731
    return mock.patch.object(transport_module.contextlib, "suppress", suppress)


def refused_requests_are_sent_for_ever():
    """No count, no delay."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(session_module, "_MAX_REPORTS", 10**9))
    stack.enter_context(mock.patch.object(link_module, "_MIN_LOSSES", 10**9))
    stack.enter_context(mock.patch.object(link_module, "_MAX_BACK_OFF_S", 0.0))
    return stack


def resumed_requests_count_as_new():
    check = QueueLimits.check_request

    def as_new(limits: QueueLimits, request: Request) -> None:
        request.message = msgspec.structs.replace(request.message, is_resumed=False)
        check(limits, request)

    return mock.patch.object(QueueLimits, "check_request", as_new)


def close_cancels_those_that_wait():
    """The recovery's cancellation reaches them."""

    async def ready(self):
        while self._connection is None:
            if self._recovery is None:
                first = self.welcome is None
                self._start_recovery(self._connect(60.0) if first else self._recover())
            await asyncio.shield(self._recovery)

    return mock.patch.object(EngineSession, "ready", ready)


def plans_change_later():
    """The list of copies is emptied and filled again."""
    take = PendingCopies.take

    def live(self):
        copies = take(self)
        if not copies.copy:
            object.__setattr__(copies, "copy", self._copies)
        return copies

    return mock.patch.object(PendingCopies, "take", live)


def new_requests_do_not_wait_for_the_engine():
    return mock.patch.object(
        EngineSession, "_recover", lambda self: self._connect(self._options.connect_timeout_s)
    )


def blocks_of_old_weights_are_found():
    return mock.patch.object(KVCacheManager, "use_weights", lambda self, name, seqs: None)


def a_new_runner_is_taken_for_the_old_one():
    return mock.patch.object(Scheduler, "forget_runner", lambda self: None)


PLANTS = [
    blocks_of_old_weights_are_found,
    a_new_runner_is_taken_for_the_old_one,
    unread_messages_are_lost,
    again_reaches_the_caller,
    refused_requests_are_sent_for_ever,
    resumed_requests_count_as_new,
    close_cancels_those_that_wait,
    plans_change_later,
    new_requests_do_not_wait_for_the_engine,
]


_SETTINGS = {
    blocks_of_old_weights_are_found: only(num_controls=(3,)),
    a_new_runner_is_taken_for_the_old_one: only(num_controls=(3,)),
    # a client that is busy while the engine finishes what it has, and goes for good
    unread_messages_are_lost: only(num_pauses=(3,), num_drains=(1,), stays_away=(True,)),
    resumed_requests_count_as_new: only(num_kills=(3,), max_queued=(4,), num_requests=(10,)),
}
_NEAR = {unread_messages_are_lost: 380, refused_requests_are_sent_for_ever: 110}
"""Seeds shortly before the first that finds a rare one: most of a minute is saved."""


def num_schedules(plant, first_seed=0):
    with plant():
        for seed in range(first_seed, _MOST_SCHEDULES):
            try:
                run_schedule(seed, _SETTINGS.get(plant))
            except Violation:
                return seed + 1 - first_seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(plant):
    assert num_schedules(plant, _NEAR.get(plant, 0)) is not None


@pytest.mark.slow
def test_an_unbounded_reading_of_messages_is_found():
    with (
        mock.patch.object(inbox_module, "_MAX_MESSAGES", 10**9),
        mock.patch.object(inbox_module, "_MAX_DRAIN_S", 10**9),
    ):
        assert largest_gap_of_floods() > 2.0


if __name__ == "__main__":
    for a_plant in PLANTS:
        print(a_plant.__name__, num_schedules(a_plant))
