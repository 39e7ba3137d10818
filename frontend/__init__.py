"""The client of engine-core: `LLM`, `AsyncLLM`, `SamplingParams` and what they return. Imports
`protocol`, never torch or the engine. A public name loads its module when it is first used."""

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
        RequestFailed,
        RequestRejected,
        TooManyClients,
    )
    from frontend.event_loop import run
    from frontend.inputs.prompts import InfillPrompt, TextPrompt, TokensPrompt
    from frontend.llm import LLM
    from frontend.logprobs import Logprob
    from frontend.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestMetrics,
        RequestOutput,
    )
    from frontend.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from frontend.pooling_params import PoolingParams
    from frontend.request_options import LoRARequest
    from frontend.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineClientError",
    "EngineDied",
    "EngineStartError",
    "EngineUnavailable",
    "InfillPrompt",
    "InvalidInput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueFull",
    "RepetitionDetectionParams",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestRejected",
    "SamplingParams",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "TooManyClients",
    "run",
]

_MODULES = (
    "errors", "event_loop", "sampling_params", "outputs", "inputs.prompts", "request_options",
    "pooling_params", "pooling", "async_llm", "llm",
)  # fmt: skip
"""Each imports only modules before it: a search in this order loads nothing needless."""


_OTHERS_OF_VLLM = {
    "LLMEngine": "LLM, or AsyncLLM for requests that come and go",
    "EngineArgs": "keyword arguments of LLM",
    "AsyncLLMEngine": "AsyncLLM; `await AsyncLLM.launch(model, ...)` starts an engine",
    "AsyncEngineArgs": "keyword arguments of `await AsyncLLM.launch(model, ...)`",
    "EmbeddingOutput": "EmbeddingRequestOutput, whose outputs has embedding",
}
"""vLLM's names that have no equal here, and what to use."""


def __getattr__(name: str) -> object:
    if name in _OTHERS_OF_VLLM:
        # an AttributeError's text would be lost in `from frontend import ...`
        raise ImportError(f"frontend has no {name}; use {_OTHERS_OF_VLLM[name]}")
    for module in _MODULES if name in __all__ else ():
        names = vars(import_module(f"frontend.{module}"))
        if name in names:
            return names[name]
    raise AttributeError(f"module 'frontend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
