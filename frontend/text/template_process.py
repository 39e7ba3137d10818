"""The processes that render chat templates, seen from the client: started when a template is first
rendered, ended and started again where a template passes a limit."""

import json
from typing import Any

import msgspec

from frontend.errors import ChatTemplateError
from frontend.sandbox_pool import SandboxPool
from protocol.sandbox import (
    Ending,
    SandboxEnded,
    SandboxLimits,
    SandboxProcess,
    SandboxRefused,
)

MAX_PROMPT_CHARS = 16 << 20
LIMITS = SandboxLimits(
    cpu_s=1.0,
    wall_s=30.0,
    memory_bytes=512 << 20,
    answer_bytes=4 * MAX_PROMPT_CHARS,  # a character has 4 bytes at most
)


class TemplateRenderers(SandboxPool):
    """Renders a conversation in each of its processes, for all threads.

    Args:
        distrust: what to do about a template that does not end, or needs too much.
        niceness: of the processes.
    """

    def __init__(self, num_processes: int, distrust: str, niceness: int = 0) -> None:
        limits = msgspec.structs.replace(LIMITS, niceness=niceness)
        super().__init__(
            lambda: SandboxProcess("frontend.text.template_sandbox", limits), num_processes
        )
        self._distrust = distrust

    def render(self, request: dict[str, Any]) -> str:
        """Calls `template_sandbox.render` there.

        Raises:
            ChatTemplateError: what that raises, or the limit that was passed.
            RecursionError: `request` is nested too deeply.
            TypeError: it has keys that JSON cannot hold.
        """
        data = json.dumps(request).encode()
        try:
            return self.call(data).decode("utf-8", "surrogatepass")
        except SandboxRefused as error:
            raise ChatTemplateError(str(error)) from None
        except SandboxEnded as error:
            raise ChatTemplateError(_why(error, self._distrust)) from None


def _why(ended: SandboxEnded, distrust: str) -> str:
    match ended.ending:
        case Ending.NOT_STARTED:
            return (
                f"cannot start a process for the chat template: {ended.detail}; close other "
                "processes, or give generate() a prompt instead"
            )
        case Ending.CPU_TIME:
            return f"the chat template took {ended.detail} of processor time; {distrust}"
        case Ending.MEMORY:
            return (
                f"the chat template needs more memory than {LIMITS.memory_bytes >> 20} MiB; "
                f"{distrust}"
            )
        case Ending.WALL_TIME:
            return (
                f"the chat template was not rendered within {LIMITS.wall_s:g} s; try again when "
                "the machine is less busy"
            )
        case Ending.CRASH:
            return f"the process that renders the chat template ended {ended.detail}; {distrust}"
