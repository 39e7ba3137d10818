"""The client of engine-core: `LLM`, `AsyncLLM`, `SamplingParams` and what they return.

Owns the public names. Must not import anything heavy: each name loads its module when it is
first used, so that `import frontend` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from frontend.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
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
    from frontend.llm import LLM
    from frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from frontend.prompts import TextPrompt, TokensPrompt
    from frontend.sampling_params import RequestOutputKind, SamplingParams

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

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "outputs",
    "EngineClientError": "errors",
    "EngineDied": "errors",
    "EngineStartError": "errors",
    "EngineUnavailable": "errors",
    "InvalidInput": "errors",
    "Logprob": "outputs",
    "QueueFull": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "RequestRejected": "errors",
    "SamplingParams": "sampling_params",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "run": "event_loop",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'frontend' has no attribute {name!r}")
    return getattr(import_module(f"frontend.{module}"), name)


def __dir__() -> list[str]:
    return __all__
