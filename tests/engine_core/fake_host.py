"""A `ModelHost` over a `PagedModel`, whose keys and values differ by weights and whose tokens do
not, so that each request has one right answer whatever is updated. Not a test."""

from collections.abc import Callable

from engine_core.errors import RequestRefused
from engine_core.executor import InProcessExecutor
from protocol.errors import ErrorCode


class WeightsSalt(dict):
    """The salt of every request's keys and values: the weights' name."""

    def __init__(self, weights: str | None) -> None:
        self.weights = weights

    def __missing__(self, _request_id: str) -> str | None:
        return self.weights

    def get(self, _request_id: str, _default: str | None = None) -> str | None:
        return self.weights


class NoSalt(dict):
    def __missing__(self, _request_id: str) -> None:
        return None

    def get(self, _request_id: str, _default: str | None = None) -> None:
        return None


class FakeHost:
    """
    Args:
        make_runner: of a runner with a PagedModel as `model`.
        fingerprint: of all weights; or, with `makes_tokens`, of those at the start.
        makes_tokens: the weights' name is their fingerprint, and tokens differ by it, too.
    """

    def __init__(
        self,
        executor: InProcessExecutor,
        make_runner: Callable[[], object],
        fingerprint: str,
        *,
        makes_tokens: bool = False,
    ) -> None:
        self.fingerprint = fingerprint
        self._makes_tokens = makes_tokens
        self.keeps_cache = True
        self.are_files_gone = False
        self._executor = executor
        self._make_runner = make_runner
        self._weights: str | None = None
        self._opened: str | None = None
        self.runner = executor.runner
        self._use(self.runner, None)

    def check_sleep(self, level: int) -> None:
        pass

    def release(self, *, weights: bool) -> None:
        self._executor.runner = None

    def restore(self) -> None:
        if self.are_files_gone:
            raise RequestRefused(ErrorCode.WEIGHTS_REFUSED, "the files are gone; bring them back")
        self._use(self._make_runner(), None)

    def open(self, model: str) -> str:
        self._opened = model
        return model if self._makes_tokens else self.fingerprint

    def update(self) -> None:
        if self._opened == "broken":
            raise RequestRefused(ErrorCode.WEIGHTS_REFUSED, "a tensor is broken; give another")
        self._weights = self._opened
        if self._makes_tokens:
            self.fingerprint = self._opened
        if self._executor.runner is not None:
            self._use(self._make_runner(), self._executor.runner.model.memory)

    def _use(self, runner, memory) -> None:
        runner.model.salts = WeightsSalt(self._weights)
        runner.model.token_salts = WeightsSalt(self._weights) if self._makes_tokens else NoSalt()
        if memory is not None:
            runner.model.memory = memory
        self.runner = self._executor.runner = runner
