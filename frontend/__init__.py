"""The client of engine-core: `LLM`, `AsyncLLM`, `SamplingParams` and what they return. Must not
know torch or the engine: it imports only `protocol`. Each public name loads its module when it is
first used, so that `import frontend` stays quick."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from frontend.errors import (
        EngineClientError,
        EngineDied,
        EngineStartError,
        EngineUnavailable,
        InvalidInput,
        QueueFull,
        RequestRejected,
    )
    from frontend.event_loop import run
    from frontend.input_processor import TextPrompt, TokensPrompt
    from frontend.llm import LLM
    from frontend.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from frontend.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineClientError",
    "EngineDied",
    "EngineStartError",
    "EngineUnavailable",
    "InvalidInput",
    "Logprob",
    "QueueFull",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestRejected",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "run",
]

_NAMES_OF_MODULES = {
    "async_llm": ("AsyncLLM",),
    "errors": (
        "EngineClientError", "EngineDied", "EngineStartError", "EngineUnavailable", "InvalidInput",
        "QueueFull", "RequestRejected",
    ),
    "event_loop": ("run",),
    "input_processor": ("TextPrompt", "TokensPrompt"),
    "llm": ("LLM",),
    "outputs": (
        "BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestMetrics",
        "RequestOutput",
    ),
    "sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    for module, names in _NAMES_OF_MODULES.items():
        if name in names:
            return getattr(import_module(f"frontend.{module}"), name)
    raise AttributeError(f"module 'frontend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
