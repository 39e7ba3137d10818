"""The process that renders chat templates, seen from the client: started when a template is first
rendered, ended and started again where a template passes a limit."""

import json
from typing import Any

from frontend.errors import ChatTemplateError
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
_DISTRUST = "do not trust this template, pass another one as chat_template"


class TemplateProcess(SandboxProcess):
    """Renders one conversation at a time, for all threads."""

    def __init__(self) -> None:
        super().__init__("frontend.template_sandbox", LIMITS)

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
            raise ChatTemplateError(_why(error)) from None


def _why(ended: SandboxEnded) -> str:
    match ended.ending:
        case Ending.NOT_STARTED:
            return (
                f"cannot start a process for the chat template: {ended.detail}; close other "
                "processes, or give generate() a prompt instead"
            )
        case Ending.CPU_TIME:
            return f"the chat template took {ended.detail} of processor time; {_DISTRUST}"
        case Ending.MEMORY:
            return (
                f"the chat template needs more memory than {LIMITS.memory_bytes >> 20} MiB; "
                "shorten the conversation, or pass another template as chat_template"
            )
        case Ending.WALL_TIME:
            return (
                f"the chat template was not rendered within {LIMITS.wall_s:g} s; try again when "
                "the machine is less busy"
            )
        case Ending.CRASH:
            return f"the process that renders the chat template ended {ended.detail}; {_DISTRUST}"
