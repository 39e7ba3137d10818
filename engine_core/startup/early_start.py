"""What makes the start short: work beside Python's own, and no garbage collection meanwhile.

Importing torch keeps the interpreter, and so one core, busy for most of the start. Must not know
options, models or sockets.
"""

import contextlib
import ctypes
import gc
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = "libtorch_cpu.so"
_OF_A_GPU = ("libtorch_cuda.so", "libtorch_hip.so")


def load_torch_library_beside() -> threading.Thread | None:
    """Let a thread map and relocate torch's largest library while this one reads and imports.

    That takes a fifth of a second, in which `import torch` would hold the interpreter's lock. A
    build for GPUs is left alone: its libraries are found by rules of its own.

    Returns:
        The thread, which needs no join, or None where there is no such library.
    """
    library = _torch_library()
    if library is None:
        return None
    # The system's loader takes one library at a time: what is imported beside it must have none
    # left to load, and numpy is all that comes with its own.
    import numpy  # noqa: F401

    # No daemon thread: an early exit waits for it rather than end the process under the loader.
    thread = threading.Thread(target=_load, args=(library,), name="load-torch")
    thread.start()
    return thread


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is searched for cycles; what exists at the end is never searched.

    Imports make 300,000 objects, nearly all for good: the collector would walk them over and
    over, a tenth of the start, and later stop a step for a tenth of a second. Not for work that
    may leave tensors in cycles.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _load(library: Path) -> None:
    with contextlib.suppress(OSError):  # `import torch` says it better
        ctypes.CDLL(str(library))


def _torch_library() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    if any((folder / name).exists() for name in _OF_A_GPU):
        return None
    library = folder / _LIBRARY
    return library if library.is_file() else None
