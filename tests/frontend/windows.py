"""A process as on Windows: without the modules, functions and flags that are Unix's alone.

python windows.py ADDRESS KEY_FILE"""

import os
import signal
import sys
from pathlib import Path

import anyio  # noqa: F401  what others look at of the platform, they see before it changes
import httpx  # noqa: F401
import prompt_toolkit  # noqa: F401
import rich.progress  # noqa: F401
import tokenizers  # noqa: F401
import tqdm  # noqa: F401
import zmq.asyncio  # noqa: F401

UNIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "uvloop")


class NoUnix:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become_windows() -> None:
    sys.meta_path.insert(0, NoUnix())
    for name in UNIX_MODULES:
        sys.modules.pop(name, None)
    sys.platform = "win32"
    for module, names in (
        (os, ("getuid", "geteuid", "killpg", "fork", "getpgid", "setsid", "fchmod")),
        (os, ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY")),
        (signal, ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM")),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def main(address: str, key_file: str) -> None:
    become_windows()
    from frontend import LLM, SamplingParams
    from frontend.cli.app import app
    from frontend.errors import EngineStartError, InvalidInput
    from protocol.keys import ClientKey, read_secret_file

    with LLM(address=address) as llm:
        (output,) = llm.generate(["on a stick"], SamplingParams(temperature=0, max_tokens=4))
        print(output.outputs[0].text)
        try:
            llm.chat([{"role": "user", "content": "Hello"}])
        except InvalidInput as error:
            print(error)
    print(read_secret_file(Path(key_file), ClientKey).name)
    for options in ({}, {"model": "smollm2-135m-instruct"}):
        try:
            LLM(**options)
        except (EngineStartError, InvalidInput) as error:
            print(error)
    app(["info", "--address", address], result_action="return_value")


if __name__ == "__main__":
    main(*sys.argv[1:])
