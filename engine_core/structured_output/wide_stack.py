"""Threads with more stack than the process that proves grammars has: what passes there passes
here."""

import threading
from collections.abc import Callable

_STACK_BYTES = 32 << 20


def start_thread(target: Callable[..., None], *args: object, name: str) -> None:
    """A daemon."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=target, args=args, name=name, daemon=True).start()
    finally:
        threading.stack_size(before)
