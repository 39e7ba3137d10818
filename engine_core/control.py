"""Pause, sleep and new weights: changes of the engine as a whole, made between two steps. Requests
wait meanwhile, and none is lost."""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine_core.errors import RequestRefused
from engine_core.lifecycle import Lifecycle, LifecycleStage
from engine_core.observers.base import EnginePart, Handler, Reply
from engine_core.scheduler import PauseState, Scheduler
from engine_core.server.clients import Client
from protocol.calls import (
    EngineState,
    EngineStatistics,
    EngineStatus,
    PauseGeneration,
    Ping,
    Pong,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from protocol.errors import ErrorCode
from protocol.outputs import WeightsUpdated
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)

PAUSE_MODES = ("keep", "wait", "abort")
_MAX_VERSION = 2**53 - 1
"""Exact in JSON."""


class ModelHost(Protocol):
    """Holds the model that the executor runs. Every method is called between two steps."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights that are served."""

    @property
    def keeps_cache(self) -> bool:
        """Whether `update` keeps the cache's contents, done or refused."""

    def check_sleep(self, level: int) -> None:
        """Raises RequestRefused if this model cannot sleep so."""

    def release(self, *, weights: bool) -> None:
        """Give back the cache's memory, and the weights'. What the executor runs is gone."""

    def restore(self) -> None:
        """Take them again.
        Raises RequestRefused: the model's files or the memory are not there; nothing changed."""

    def open(self, model: str) -> str:
        """The fingerprint of other weights of the same model, to be given to `update` next.
        Raises RequestRefused: they are not there, or do not fit."""

    def update(self) -> None:
        """Load what was opened last in place of the weights. Their runner begins anew. Raises
        RequestRefused: the tensors do not fit, or have no room; the weights are the old ones."""


class EngineControl(EnginePart):
    """
    running --pause--> paused --resume--> running          sleep: from both; wake_up: to where it
       \\________________sleep__________________ asleep      was before

    Args:
        host: None: this engine can only pause.
        on_weights: called with the version and the fingerprint of new weights.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        host: ModelHost | None = None,
        on_weights: Callable[[int, str], None] = lambda version, fingerprint: None,
    ) -> None:
        self.weights_version = 0
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._host = host
        self._on_weights = on_weights
        self._is_paused = False
        self._is_cut_short = False
        """Whether a pause of mode wait was ended by another call."""
        self._pauses: list[tuple[Client, Reply]] = []
        """Calls that are answered when the pause begins."""
        self._sleep_level = 0
        self._fingerprints = {} if host is None else {0: host.fingerprint}
        """Fingerprints of weights by version."""

    @property
    def state(self) -> EngineState:
        if self._sleep_level:
            return EngineState.ASLEEP
        return EngineState.PAUSED if self._is_paused else EngineState.RUNNING

    @property
    def is_pausing(self) -> bool:
        """Whether requests that have started run on before the pause begins."""
        return self._scheduler.pause_state is PauseState.PAUSED_NEW

    # ------------------------------------------------------------------ as a part of the engine

    def handlers(self) -> dict[type, Handler]:
        changes: dict[type, Callable[..., None]] = {
            PauseGeneration: self.pause,
            ResumeGeneration: self.resume,
            Sleep: self.sleep,
            WakeUp: self.wake_up,
            UpdateWeights: self.update_weights,
        }

        def answer(client: Client, call: msgspec.Struct, reply: Reply) -> EngineStatus | None:
            """Answer the call; while the engine drains nothing may hold up requests."""
            is_draining = self._lifecycle.stage is not LifecycleStage.SERVING
            if is_draining and not isinstance(call, ResumeGeneration | WakeUp):
                raise RequestRefused(
                    ErrorCode.WRONG_STATE, "the engine is draining; call the one that follows it"
                )
            changes[type(call)](*msgspec.structs.astuple(call))
            if isinstance(call, PauseGeneration) and self.is_pausing:
                self._pauses.append((client, reply))
                return None
            return self._status()

        return {Ping: self._ping, **dict.fromkeys(changes, answer)}

    @property
    def is_busy(self) -> bool:
        return bool(self._pauses)

    def on_departure(self, client: Client) -> None:
        self._pauses = [each for each in self._pauses if each[0] is not client]

    def on_applied(self) -> None:
        if not self._pauses or self.is_pausing:
            return
        answer: EngineStatus | RequestRefused = self._status()
        if self._is_cut_short:
            why = f"the engine is {self.state}, and not all that had started has ended; pause again"
            answer = RequestRefused(ErrorCode.WRONG_STATE, why)
        for _, reply in self._pauses:
            reply(answer)
        self._pauses.clear()

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        return msgspec.structs.replace(
            numbers, state=self.state, weights_version=self.weights_version
        )

    def resolve(self, message: EngineRequest) -> EngineRequest:
        self.check_weights(message.weights_fingerprint)
        return message

    # ------------------------------------------------------------------ what it can be asked for

    def check_weights(self, began_with: str | None) -> None:
        """Raises RequestRefused: a request that another engine began would get tokens of other
        weights here, or might: those that it waits for may be others."""
        if began_with is None or self._host is None:
            return
        if began_with != self._host.fingerprint:
            raise RequestRefused(
                ErrorCode.WEIGHTS_REFUSED,
                "the engine serves other weights than those that this request began with; send it "
                "to one of those weights, or anew",
            )
        if self._scheduler.pause_state is PauseState.PAUSED_ALL:
            raise RequestRefused(
                ErrorCode.WRONG_STATE,
                f"the engine is {self.state}, and its weights may change before it goes on; send "
                "the request to another one, or anew",
            )

    def pause(self, mode: str) -> None:
        """Raises RequestRefused: an unknown mode; or asleep, where nothing can end."""
        if mode not in PAUSE_MODES:
            raise RequestRefused(
                ErrorCode.INVALID_REQUEST, f"mode is {mode!r}, it must be one of {PAUSE_MODES}"
            )
        if mode == "wait" and self._sleep_level:
            raise RequestRefused(
                ErrorCode.WRONG_STATE, "the engine is asleep; call wake_up before, or use mode keep"
            )
        self._is_paused = True
        if mode == "wait":
            self._set_pause(PauseState.PAUSED_NEW, _PAUSED)
        elif not self._sleep_level:
            self._set_pause(PauseState.PAUSED_ALL, _PAUSED)
            self.loop.settle()
        if mode == "abort":
            self.loop.abort_all()

    def resume(self) -> None:
        """Raises RequestRefused: the engine is asleep."""
        if self._sleep_level:
            raise RequestRefused(
                ErrorCode.WRONG_STATE, "the engine is asleep; call wake_up, which resumes it"
            )
        self._is_paused = False
        self._set_pause(PauseState.UNPAUSED)

    def sleep(self, level: int) -> None:
        """Requests lose their blocks and are computed again afterwards.
        Raises RequestRefused: an unknown level, or this model cannot sleep so."""
        host = self._host_for("sleep")
        if level not in (1, 2):
            raise RequestRefused(
                ErrorCode.INVALID_REQUEST,
                f"level is {level}, it must be 1 (the KV cache goes) or 2 (the weights go, too)",
            )
        host.check_sleep(level)
        if not self._sleep_level:
            self._take_blocks("the engine sleeps")
        if level > self._sleep_level:
            self._sleep_level = level
            host.release(weights=level == 2)
            self._forget_runner()
            logger.info("asleep at level %d", level)

    def wake_up(self) -> None:
        """Raises RequestRefused: memory or weights are not there; the engine sleeps on."""
        if self._sleep_level:
            self._host_for("wake_up").restore()
            self._sleep_level = 0
            self._end_hold()
            logger.info("awake")

    def update_weights(self, model: str, version: int | None) -> None:
        """Raises RequestRefused: the weights do not fit, or the version is that of others."""
        host = self._host_for("update_weights")
        fingerprint = host.open(model)
        version = self._check_version(version, fingerprint)
        state = self._scheduler.pause_state
        if not self._sleep_level:
            self._take_blocks("other weights are loaded")
        try:
            host.update()
        finally:
            if not host.keeps_cache:
                self._forget_runner()
            if not self._sleep_level:
                self._end_hold(state)
        self._sleep_level = min(self._sleep_level, 1)
        self.weights_version, self._fingerprints[version] = version, fingerprint
        # the start's blocks have no name, so that they are found whatever was updated since
        name = f"{version}:{fingerprint}" if version else ""
        self._scheduler.use_weights(name, version)
        self.loop.note("use_weights", (name, version))
        self._on_weights(version, fingerprint)
        self.loop.broadcast(WeightsUpdated(weights_version=version, fingerprint=fingerprint))
        logger.info("weights version %d: %s", version, model)

    def on_drain(self) -> None:
        """Let what is unfinished end now, if it can."""
        if self.state is EngineState.RUNNING:
            return
        try:
            self.wake_up()
            self.resume()
        except RequestRefused as error:
            logger.warning("requests end by --drain-timeout: %s", error)

    # ------------------------------------------------------------------ parts of these

    def _ping(self, client: Client, call: Ping, reply: Reply) -> Pong:
        now_s, progress = self.loop.clock(), self.loop.progress
        return Pong(
            uptime_s=now_s - self.loop.started_s,
            step_id=progress.step_id,
            progress_age_s=now_s - progress.at_s,
            state=self.state,
        )

    def _status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state,
            weights_version=self.weights_version,
            num_requests=sum(self._scheduler.get_request_counts()),
        )

    def _host_for(self, what: str) -> ModelHost:
        if self._host is None:
            raise RequestRefused(ErrorCode.NOT_SUPPORTED, f"this engine does not support {what}")
        return self._host

    def _check_version(self, version: int | None, fingerprint: str) -> int:
        largest = max(self._fingerprints)
        version = largest + 1 if version is None else version
        if largest < version <= _MAX_VERSION or self._fingerprints.get(version) == fingerprint:
            return version
        raise RequestRefused(
            ErrorCode.WEIGHTS_REFUSED,
            f"version is {version}, and the largest so far is {largest}; give a larger one, at "
            f"most {_MAX_VERSION}, or that of these same files",
        )

    def _take_blocks(self, why: str) -> None:
        """No request runs, none holds blocks."""
        self._set_pause(PauseState.PAUSED_ALL, why)
        self._scheduler.preempt_all(why)
        self.loop.note("preempt_all", (why,))
        self.loop.settle()

    def _end_hold(self, state: PauseState | None = None) -> None:
        """Back to what was before `_take_blocks`."""
        if state is None:
            state = PauseState.PAUSED_ALL if self._is_paused else PauseState.UNPAUSED
        self._set_pause(state, _PAUSED)

    def _set_pause(self, state: PauseState, why: str = "") -> None:
        self._is_cut_short = self.is_pausing and state is not PauseState.PAUSED_NEW
        self._scheduler.set_pause_state(state, why)
        self.loop.note("set_pause_state", (state.name, why))

    def _forget_runner(self) -> None:
        self._scheduler.forget_runner()
        self.loop.note("forget_runner", ())


_PAUSED = "the engine is paused; resume_generation lets it go on"
