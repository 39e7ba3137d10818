"""What a call says of its requests beside prompts and parameters: whose, how urgent, how long."""

from dataclasses import dataclass
from typing import Any, TypedDict

from frontend.errors import InvalidInput
from frontend.sampling_params import as_invalid_input
from protocol.requests import check_name, check_timeout
from protocol.sampling import check_whole

_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's: an adapter by name, read from `lora_path` if the engine does not know it.

    Args:
        lora_int_id: not used; the name tells adapters apart.
        lora_path: a folder of PEFT's or a .gguf file, where the engine is. Needs an engine that was
            started here, or with --adapter-dir. Empty: only one that the engine knows.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name


class SharedOptions(TypedDict, total=False):
    """Of all requests of a call, whose docstring says what they mean: `AsyncLLM.generate`."""

    tenant: str | None
    cache_salt: str | None
    timeout_s: float | None
    adapter: str | None


class RequestOptions(SharedOptions, total=False):
    """Options of one request."""

    priority: int
    lora_request: LoRARequest | None


def adapter_of(options: RequestOptions) -> LoRARequest | None:
    """Of two ways to say it. Raises InvalidInput: both, or neither a name nor a LoRARequest."""
    adapter, lora_request = options.get("adapter"), options.get("lora_request")
    if adapter is not None and lora_request is not None:
        raise InvalidInput("adapter and lora_request are the same; give one of them")
    if lora_request is not None:
        # vLLM's own class will do
        name, path = (getattr(lora_request, each, None) for each in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise InvalidInput(f"lora_request is {lora_request!r}, it must be a LoRARequest")
        return LoRARequest(name, lora_path=path)
    if adapter is None:
        return None
    if not isinstance(adapter, str) or not adapter:
        raise InvalidInput(f"adapter is {adapter!r}, it must be the name of one")
    return LoRARequest(adapter)


def wire_options(
    *,
    priority: int = 0,
    tenant: str | None = None,
    cache_salt: str | None = None,
    timeout_s: float | None = None,
    adapter: str | None = None,
    lora_request: LoRARequest | None = None,
    **unknown: object,
) -> dict[str, Any]:
    """These `RequestOptions` as fields of an EngineRequest; the salt is not checked.
    Raises InvalidInput unless they are a 32-bit whole number, a name, seconds and one adapter."""
    for name in unknown:
        raise InvalidInput(
            f"there is no option {name}; there are priority, tenant, cache_salt, timeout_s, "
            "adapter and lora_request, and the fields of SamplingParams and PoolingParams"
        )
    with as_invalid_input():
        check_timeout(timeout_s)
        check_whole("priority", priority, minimum=-_MAX_PRIORITY, maximum=_MAX_PRIORITY)
    if tenant is not None and not (isinstance(tenant, str) and tenant):
        raise InvalidInput(f"tenant is {tenant!r}, it must be a non-empty string")
    if tenant is not None:
        with as_invalid_input():
            check_name("tenant", tenant)
    lora = adapter_of({"adapter": adapter, "lora_request": lora_request})
    return {
        "priority": priority,
        "tenant": tenant,
        "cache_salt": cache_salt,
        "timeout_s": timeout_s,
        "adapter": None if lora is None else lora.name,
    }
