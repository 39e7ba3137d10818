"""The way to one engine: connected, lost, and connected again."""

import abc
import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, NotRequired, TypedDict, Unpack

from frontend.engine.connection import Connection, ConnectionOptions
from frontend.engine.daemon import ChildDaemon
from frontend.engine.transport import Frames, Transport
from frontend.errors import (
    ClientClosed,
    EngineDied,
    EngineRefused,
    EngineUnavailable,
    TooManyClients,
)
from frontend.event_loop import Clock
from protocol.base import Message
from protocol.errors import MalformedMessage
from protocol.outputs import EngineMessage, Welcome

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_MAX_BACK_OFF_S = 5.0
_MIN_LOSSES = 3
"""So many losses without output are borne, however long they take."""


class LinkArguments(TypedDict):
    """How an engine is reached. `child`: its process, if this client started it: its end is
    reported with its exit code and last lines, and final unless it is one that starts an engine
    again."""

    transport: Transport
    options: ConnectionOptions
    clock: Clock
    child: NotRequired[ChildDaemon | None]


class EngineLink(abc.ABC):
    """
    connected --lost, requests in flight--> recovering --back, same model--> connected
                                                |---------not in time------> disconnected
    connected --lost, nothing in flight--> disconnected --next use--> recovering

    Losses without any output between them are answered with a growing delay, and end the requests
    once they have gone on for the time limit.
    """

    def __init__(self, **how: Unpack[LinkArguments]) -> None:
        self.welcome: Welcome | None = None
        self.welcome_frames: Frames = ()
        self._transport = how["transport"]
        self._options = how["options"]
        self._address = self._options.address
        self._clock = how["clock"]
        self._child = how.get("child")
        self._connection: Connection | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_losses = 0
        """Losses since the last output."""
        self._first_loss_s = 0.0
        self._loss_reason = ""

    @abc.abstractmethod
    def _on_message(self, message: EngineMessage) -> None:
        """Take one of an open connection's messages."""

    @abc.abstractmethod
    def _on_welcome(self, welcome: Welcome) -> None:
        """Note what the engine says of itself, before anything is sent to it."""

    @abc.abstractmethod
    def _on_loss(self, reason: str) -> bool:
        """End what cannot go on. Returns whether anything waits for the engine."""

    @abc.abstractmethod
    async def _recover(self) -> None:
        """Wait for the engine to come back; resume what was interrupted, or end it."""

    @abc.abstractmethod
    def _on_attempt_over(self) -> None:
        """An attempt to connect has ended, also in vain."""

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def silence_s(self) -> float:
        """Seconds since the engine has sent anything; 0 without a connection."""
        return 0.0 if self._connection is None else self._connection.silence_s()

    async def ready(self, *, waits: bool = True) -> None:
        """Return once connected. An engine that was there before is waited for, as by the requests
        in flight; one that was never seen must answer.
        With `waits` False one attempt is made.
        Raises EngineUnavailable, EngineRefused, ClientClosed, EngineDied."""
        if self._is_closed:
            raise ClientClosed("this client is closed; make a new one")
        while self._connection is None:
            is_other = self._recovery is not None
            if self._recovery is None:
                self._start_recovery(
                    self._connect(self._options.connect_timeout_s)
                    if self.welcome is None or not waits
                    else self._recover()
                )
            assert self._recovery is not None
            try:
                await self._wait_for(self._recovery)
            except EngineUnavailable:
                # what was under way may have been one attempt only
                if not (is_other and waits and self.welcome is not None):
                    raise

    async def _wait_for(self, recovery: asyncio.Task[None]) -> None:
        """Closing the client cancels the recovery, not those that wait for it."""
        try:
            await asyncio.shield(recovery)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise ClientClosed("this client was closed") from None
            raise

    async def close(self) -> None:
        """Say GOODBYE, close the transport."""
        self._is_closed = True
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        self._disconnect()
        self._connection = None
        self._transport.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _send(self, message: Message, frames: Frames = ()) -> None:
        """Dropped without a connection: what is missing is sent when the engine is back."""
        if self._connection is not None:
            self._connection.send(message, frames)

    def _on_lost(self, reason: str) -> None:
        if self._is_closed or self._connection is None:
            return
        self._connection = None
        if not self._num_losses:
            self._first_loss_s = self._clock.now()
        self._num_losses += 1
        self._loss_reason = reason
        logger.warning("lost the engine at %s: %s", self._address, reason)
        if self._on_loss(reason) or self._child is not None:
            self._start_recovery(self._recover())

    def _start_recovery(self, attempt: Coroutine[Any, Any, None]) -> None:
        self._recovery = asyncio.create_task(attempt)
        self._recovery.add_done_callback(self._recovery_ended)

    def _recovery_ended(self, task: asyncio.Task[None]) -> None:
        if self._recovery is task:
            self._recovery = None
        if not task.cancelled():
            task.exception()  # `ready` and the requests have reported it
        self._on_attempt_over()

    async def _connect(self, timeout_s: float) -> None:
        child = None if self.welcome is None else self._child
        if child is not None and not child.restarts:
            raise EngineDied(await child.exit_report(), address=self._address)
        connection = Connection(
            self._transport,
            self._options,
            clock=self._clock,
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        opening = connection.open(timeout_s)
        welcome, self.welcome_frames = await (
            opening if child is None else child.unless_it_ends(opening)
        )
        self.welcome = welcome
        self._on_welcome(welcome)
        if connection.is_closed:
            raise EngineUnavailable(f"the engine at {self._address} went away; try again")
        self._connection = connection

    async def _reconnect(self) -> None:
        limit_s, reason = self._options.reconnect_timeout_s, self._loss_reason
        if self._num_losses > 1:
            lost_for_s = self._clock.now() - self._first_loss_s
            if self._num_losses > _MIN_LOSSES and lost_for_s > limit_s:
                raise self._died(
                    f"was lost {self._num_losses} times within {lost_for_s:.0f} s without any "
                    f"output, the last time: {reason}"
                )
            await self._clock.sleep(min(_RETRY_S * 2 ** (self._num_losses - 2), _MAX_BACK_OFF_S))
        deadline_s = self._clock.now() + limit_s
        while True:
            left_s = max(deadline_s - self._clock.now(), _RETRY_S)
            try:
                await self._connect(min(left_s, self._options.connect_timeout_s))
                return
            except (EngineUnavailable, EngineRefused) as error:
                if isinstance(error, EngineRefused) and not _may_pass(error):
                    raise
                if self._clock.now() + _RETRY_S >= deadline_s:
                    raise self._died(
                        f"is gone ({reason}) and did not come back within {limit_s:g} s; "
                        "start it again with `engine-core --model MODEL`"
                    ) from None
            await self._clock.sleep(_RETRY_S)

    def _died(self, how: str) -> EngineDied:
        return EngineDied(f"the engine at {self._address} {how}", address=self._address)


def _may_pass(error: EngineRefused) -> bool:
    """Whether it has no place at the moment, or its answer to HELLO could not be read: from an
    engine known before, a fault of the connection."""
    return isinstance(error, TooManyClients) or isinstance(error.__cause__, MalformedMessage)
