"""Counts Triton's compilations in this process. After startup there should be none."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class CompileCounter:
    """Compilations since `watch_triton` was called."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self._num_when_ready: int | None = None

    @property
    def num_after_ready(self) -> int:
        """Compilations since `mark_ready`; 0 before it."""
        return 0 if self._num_when_ready is None else self.num_compilations - self._num_when_ready

    def mark_ready(self) -> None:
        """From here on a compilation makes a request wait, and is a defect."""
        self._num_when_ready = self.num_compilations

    def compiled(self, name: str, specialisation: str) -> None:
        """One kernel was compiled; its options and argument types are for the log."""
        self.num_compilations += 1
        if self._num_when_ready is not None:
            logger.warning(
                "kernel %s was compiled while serving (%d since ready): a request waited for it; "
                "please report this variant: %s",
                name,
                self.num_after_ready,
                specialisation,
            )


def watch_triton(counter: CompileCounter) -> Callable[[], None]:
    """Count what Triton compiles until the returned function is called; a former hook runs too.

    Triton calls the hook for each specialisation that is new to this process, compiled or loaded
    from the cache on disk. Both count: with an empty cache the second takes seconds."""
    from triton import knobs

    former = knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> bool | None:
        counter.compiled(f"{event['fn'].module}.{event['fn'].name}", event["repr"])
        result: bool | None = former(**event) if former is not None else None
        return result

    def end() -> None:
        knobs.runtime.jit_post_compile_hook = former

    knobs.runtime.jit_post_compile_hook = hook
    return end
