"""The processes that decode image and sound files, seen from the client. A file is foreign, and so
is what it makes of its decoder: the process ends at a limit, or by a fault, and the request with
it."""

import json

from frontend.errors import InvalidInput
from frontend.sandbox_pool import SandboxPool
from frontend.shared_threads import NUM_MEDIA_THREADS
from protocol.sandbox import SandboxEnded, SandboxLimits, SandboxProcess, SandboxRefused

LIMITS = SandboxLimits(
    cpu_s=10.0,
    wall_s=120.0,
    memory_bytes=2 << 30,
    answer_bytes=1 << 30,
)
"""The largest image, 8192 * 8192 pixels, needs about 1 GiB in all of its copies, the longest
sound, an hour, as much."""

media_processes = SandboxPool(
    lambda: SandboxProcess("frontend.multimodal.media_sandbox", LIMITS), NUM_MEDIA_THREADS
)


def decoded(modality: str, name: str, data: bytes | bytearray | memoryview, rate: int = 0) -> bytes:
    """What `media_sandbox.py` makes of a file's bytes.

    Args:
        name: for errors.
        rate: of a sound.

    Raises:
        InvalidInput: the file is refused, or takes more than the limits, or ends its decoder.
    """
    head = json.dumps([modality, name, rate]).encode()
    try:
        return media_processes.call(b"\n".join((head, data)))
    except SandboxRefused as error:
        raise InvalidInput(str(error)) from None
    except SandboxEnded as error:
        raise InvalidInput(
            f"{name} cannot be decoded: its decoder ended ({error}); send another file"
        ) from None
