"""What users of other engines type: commands of `engine-client` are `engine-core`'s, too, and a
model may stand without `--model`."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine_core.errors import ConfigurationError
from protocol.programs import become

CLIENT_COMMANDS = {
    "serve": "Start a daemon and serve MODEL over HTTP: the APIs of OpenAI, Anthropic and Ollama.",
    "run": "Talk with MODEL; its daemon is started if none runs.",
    "bench": "Measure a daemon, or any server with OpenAI's or Ollama's API, under load.",
    "compare": "Compare two results of `bench --json`.",
    "chat": "Talk with the daemon that runs.",
    "complete": "Complete a prompt, once.",
    "embed": "Print a vector for each text, as lines of JSON.",
    "http": "Serve over HTTP daemons that run, or that it starts when they are asked for.",
    "info": "Show the daemon's model, limits and statistics, or one request's state.",
    "launch": "Run a coding agent (claude, codex, opencode, aider) on a model.",
    "ps": "List the running daemons of this user.",
    "top": "Watch the daemon.",
} | dict.fromkeys(("pause", "resume", "sleep", "wake-up", "update-weights"), "")  # fmt: skip
"""Those without a text are not in `--help`."""

_INSTEAD = {
    "start": "`engine-core serve MODEL`",
    "run-batch": "`engine-core batch FILE`",
    **dict.fromkeys(("push", "signin", "signout"), "models are fetched, never sent"),
}  # fmt: skip

_SAME_AS = {"ls": "list", "help": "--help", "version": "--version", "-v": "--version",
            "-V": "--version"}  # fmt: skip
_OPTIONS_INSTEAD = {
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "use --memory-fraction"),
    **dict.fromkeys(("--ctx-size", "-c", "--context-length"), "use --max-model-len"),
    **dict.fromkeys(("--n-gpu-layers", "-ngl"), "a model is on one device: use --device"),
    **dict.fromkeys(("--model-path", "-m", "-hf"), "name the model first, or with --model"),
    **dict.fromkeys(("--parallel", "-np"), "use --max-num-seqs"),
    **dict.fromkeys(("--batch-size", "-b", "--ubatch-size", "-ub"), "use --max-num-batched-tokens"),
    **dict.fromkeys(("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"), "use --kv-cache-dtype"),
    **dict.fromkeys(("--model-draft", "-md"), "use --speculative draft --draft-model FILE"),
    **dict.fromkeys(("--jinja", "--flash-attn", "-fa", "--cont-batching", "-cb", "--metrics"),
                    "always on; omit it"),
    **dict.fromkeys(("--generation-config", "--override-generation-config"), "the model's own is "
        "what requests get that say nothing; say it in requests, or `engine-core create NAME`"),
    **dict.fromkeys(("--compilation-config", "-O", "-O0", "-O1", "-O2", "-O3", "--async-scheduling",
        "--max-seq-len-to-capture", "--distributed-executor-backend"),
        "the engine decides; omit it"),
    **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config.backend"),
                    "llguidance does it; omit it"),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr"), "see docs/guides/parallel.md"),
    **dict.fromkeys(("--cpu-offload-gb", "--n-cpu-moe", "-ncmoe"), "use --cpu-experts"),
    "--enable-sleep-mode": "always on: `engine-client sleep`",
    "--lora": "use --adapter NAME=FILE",
    "--task": "use --runner pooling with --convert embed or classify",
    "--uvicorn-log-level": "use --log-level",
    **dict.fromkeys(("--threads", "-t"), "use --num-threads"),
    **dict.fromkeys(("--enable-auto-tool-choice", "--enable-chunked-prefill"), "always on"),
    **dict.fromkeys(("--disable-log-requests", "--disable-log-stats"), "none is logged; omit it"),
    "--kv-cache-memory-bytes": "use --kv-cache-memory",
    "--num-gpu-blocks-override": "use --num-blocks",
    "--swap-space": "use --host-cache-memory",
    "--speculative-config": "use --speculative, --draft-model, --num-speculative-tokens",
    "--lora-modules": "use --adapter NAME=FOLDER",
    "--allowed-origins": "use --cors-origin of `engine-core serve`",
    "--revision": "name the model as org/name@revision",
    "--trust-remote-code": "only code of this release runs; omit it",
    "--download-dir": "models are kept below XDG_CACHE_HOME; omit it",
    "--chat-template": "a model's own is used; another is TEMPLATE in `engine-core create NAME`",
    "--seed": "a seed is part of a request; omit it",
    **dict.fromkeys(("--keepalive", "--keep-alive"), "a daemon stays while its command runs; "
                    "`engine-client http --model NAME --keep-alive 10m` stops idle ones"),
    **dict.fromkeys(("--nowordwrap", "--hidethinking"), "omit it"),
    "--format": "`format` of a request to `engine-client serve` asks for JSON",
    "--think": "`think` of a request to `engine-client serve` says so",
    "--verbose": "a chat says its tokens a second; `engine-client complete --chat --json` all",
}  # fmt: skip
"""Options of vLLM, SGLang, llama.cpp and Ollama, and what to do here instead."""


def as_typed(arguments: Sequence[str], own_commands: Iterable[str]) -> list[str]:
    """The arguments for our own parser. Does not return for a command of the client, which this
    process becomes.
    Raises ConfigurationError: a word of other engines or a misspelt one; with the right one."""
    first = next(iter(arguments), "-")
    first = _SAME_AS.get(first, first)
    own_commands = list(own_commands)
    if list(arguments[:1]) == ["help"] and arguments[1:]:  # `help run`
        first, arguments = arguments[1], [arguments[1], "--help"]
    if first in CLIENT_COMMANDS:
        become("frontend.cli", list(arguments))
    if first in _INSTEAD:
        raise ConfigurationError(f"there is no command {first!r}; {_INSTEAD[first]}")
    if first not in own_commands or first == "check":
        for option in (each.partition("=")[0].replace("_", "-") for each in arguments):
            if option in _OPTIONS_INSTEAD:
                raise ConfigurationError(f"there is no option {option}: {_OPTIONS_INSTEAD[option]}")
    if first.startswith("-") or first in own_commands:
        return [first, *arguments[1:]] if arguments else []
    near = difflib.get_close_matches(first, [*own_commands, *CLIENT_COMMANDS], n=1, cutoff=0.7)
    if near and not Path(first).exists():
        raise ConfigurationError(f"there is no command {first!r}; did you mean {near[0]!r}?")
    return ["--model", *arguments]
