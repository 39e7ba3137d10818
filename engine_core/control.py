"""Pause, sleep and new weights: changes of the engine as a whole, made between two steps. Requests
wait meanwhile, and none is lost."""

import logging
from collections.abc import Callable
from typing import Protocol, assert_never

from engine_core.errors import RequestRefused
from engine_core.observers.base import ControlMethod
from engine_core.scheduler import PauseState, Scheduler
from protocol.calls import (
    EngineState,
    EngineStatus,
    PauseGeneration,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from protocol.errors import ErrorCode
from protocol.outputs import CallFailed, CallResult

logger = logging.getLogger(__name__)

Change = PauseGeneration | ResumeGeneration | Sleep | WakeUp | UpdateWeights

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


class EngineControl:
    """
    running --pause--> paused --resume--> running          sleep: from both; wake_up: to where it
       \\________________sleep__________________ asleep      was before

    Args:
        host: None: this engine can only pause.
        settle: runs one step of a paused scheduler, behind those in flight, to its end.
        abort_all: aborts the requests of all clients.
        announce: tells clients the version and the fingerprint of new weights.
        note: what was asked of the scheduler, for traces: a method's name and its arguments.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        host: ModelHost | None,
        *,
        is_draining: Callable[[], bool],
        settle: Callable[[], None],
        abort_all: Callable[[], None],
        announce: Callable[[int, str], None],
        note: Callable[[ControlMethod, tuple[str | int, ...]], None],
    ) -> None:
        self.weights_version = 0
        self._scheduler = scheduler
        self._host = host
        self._settle = settle
        self._abort_all = abort_all
        self._announce = announce
        self._note = note
        self._is_draining = is_draining
        self._is_paused = False
        self._is_cut_short = False
        """Whether a pause of mode wait was ended by another call."""
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

    def answer(self, call_id: int, change: Change) -> CallResult | CallFailed:
        """Carry out a call. In a drain nothing may hold up requests."""
        try:
            if self._is_draining() and not isinstance(change, ResumeGeneration | WakeUp):
                raise RequestRefused(
                    ErrorCode.WRONG_STATE, "the engine is draining; call the one that follows it"
                )
            match change:
                case PauseGeneration(mode):
                    self.pause(mode)
                case ResumeGeneration():
                    self.resume()
                case Sleep(level):
                    self.sleep(level)
                case WakeUp():
                    self.wake_up()
                case UpdateWeights(model, version):
                    self.update_weights(model, version)
                case _:
                    assert_never(change)
        except RequestRefused as error:
            return CallFailed(call_id=call_id, code=error.code, message=str(error))
        return self._status(call_id)

    def answer_pause(self, call_id: int) -> CallResult | CallFailed:
        """Once `is_pausing` is over."""
        if not self._is_cut_short:
            return self._status(call_id)
        why = f"the engine is {self.state}, and not all that had started has ended; pause again"
        return CallFailed(call_id=call_id, code=ErrorCode.WRONG_STATE, message=why)

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
            self._settle()
        if mode == "abort":
            self._abort_all()

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
        self._note("use_weights", (name, version))
        self._announce(version, fingerprint)
        logger.info("weights version %d: %s", version, model)

    def finish_for_drain(self) -> None:
        """Let what is unfinished end now, if it can."""
        if self.state is EngineState.RUNNING:
            return
        try:
            self.wake_up()
            self.resume()
        except RequestRefused as error:
            logger.warning("requests end by --drain-timeout: %s", error)

    # ------------------------------------------------------------------ parts of these

    def _status(self, call_id: int) -> CallResult:
        status = EngineStatus(
            state=self.state,
            weights_version=self.weights_version,
            num_requests=sum(self._scheduler.get_request_counts()),
        )
        return CallResult(call_id=call_id, result=status)

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
        self._note("preempt_all", (why,))
        self._settle()

    def _end_hold(self, state: PauseState | None = None) -> None:
        """Back to what was before `_take_blocks`."""
        if state is None:
            state = PauseState.PAUSED_ALL if self._is_paused else PauseState.UNPAUSED
        self._set_pause(state, _PAUSED)

    def _set_pause(self, state: PauseState, why: str = "") -> None:
        self._is_cut_short = self.is_pausing and state is not PauseState.PAUSED_NEW
        self._scheduler.set_pause_state(state, why)
        self._note("set_pause_state", (state.name, why))

    def _forget_runner(self) -> None:
        self._scheduler.forget_runner()
        self._note("forget_runner", ())


_PAUSED = "the engine is paused; resume_generation lets it go on"
