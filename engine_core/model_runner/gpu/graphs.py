"""Steps captured as CUDA graphs: which there are, and when each is captured."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine_core.model_runner.gpu.queue import Work
from engine_core.model_runner.gpu.step_buckets import StepBucket, StepBuckets
from kernels.interface.device_steps import SamplingMode

logger = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """`mode` None: only up to the logits. `has_parts`: with what parts of rows launch, as adapters
    do; other steps launch nothing for them."""

    bucket: StepBucket
    mode: SamplingMode | None
    has_parts: bool = False


class StepGraphs:
    """All graphs take their memory from one pool, in which a smaller graph finds room in the parts
    of a larger one. So the largest is captured before all others, with all that sampling offers,
    and the pool grows no more.

    Args:
        buckets: those of mixed steps serve plain and truncated sampling without parts; what
            else such a step wants is launched piece by piece.
        has_parts: whether parts of rows may launch something in decode steps.
        capture: makes what replays the step of a key.
    """

    def __init__(
        self,
        buckets: StepBuckets,
        *,
        has_parts: bool,
        capture: Callable[[GraphKey], Work],
    ) -> None:
        self._capture = capture
        self._captured: dict[GraphKey, Work] = {}
        self._is_broken = False

        def keys(
            buckets: Sequence[StepBucket], *modes: SamplingMode | None, kinds: Sequence[bool]
        ) -> list[GraphKey]:
            return [GraphKey(*key) for key in itertools.product(buckets, modes, kinds)]

        decodes, mixed = buckets.decodes[::-1], buckets.mixed[::-1]
        kinds = (False, True) if has_parts else (False,)
        common = (SamplingMode.PLAIN, SamplingMode.TRUNCATED)
        self.largest = [
            *keys(decodes[:1], SamplingMode.FULL, None, kinds=kinds),
            *keys(mixed[:1], SamplingMode.TRUNCATED, kinds=(False,)),
        ]
        at_start = keys(decodes, *common, kinds=kinds) + keys(mixed, *common, kinds=(False,))
        self.at_start = list(dict.fromkeys([*self.largest, *at_start]))
        """Graphs that are captured at start-up, so that no step waits for them."""
        self.all = [*self.at_start, *keys(decodes[1:], SamplingMode.FULL, None, kinds=kinds)]

    def __len__(self) -> int:
        """How many graphs are captured."""
        return len(self._captured)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def replay_of(self, key: GraphKey) -> Work:
        """What replays it; captured now if it is not yet. Called inside launched work."""
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._capture(key)
        return graph

    def capture(self, keys: Iterable[GraphKey]) -> None:
        """Those of them that are missing. Called inside launched work."""
        for key in keys:
            self.replay_of(key)

    def next_missing(self) -> GraphKey | None:
        """The graph to capture while nothing else runs; None: nothing is left, or it failed."""
        if self._is_broken:
            return None
        return next((key for key in self.all if key not in self._captured), None)

    def give_up(self, key: GraphKey, error: Exception) -> None:
        """Capture no more ahead: from now on each graph is captured when a step needs it."""
        self._is_broken = True
        logger.warning("the CUDA graph %s was not captured ahead of its first use: %s", key, error)
