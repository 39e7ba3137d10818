"""What a call says of its requests beside prompts and parameters: whose, how urgent, how long."""

from typing import Any, TypedDict

from frontend.adapters import LoRARequest, one_adapter
from frontend.errors import InvalidInput
from frontend.sampling_params import as_invalid_input
from protocol.requests import check_name, check_timeout
from protocol.sampling import check_whole

_MAX_PRIORITY = 2**31 - 1


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
    """Raises InvalidInput: see `one_adapter`."""
    return one_adapter(options.get("adapter"), options.get("lora_request"))


def wire_options(
    *,
    priority: int = 0,
    tenant: str | None = None,
    cache_salt: str | None = None,
    timeout_s: float | None = None,
    adapter: str | None = None,
    lora_request: LoRARequest | None = None,
) -> dict[str, Any]:
    """These `RequestOptions` as fields of an EngineRequest; the salt is not checked.
    Raises InvalidInput unless they are a 32-bit whole number, a name, seconds and one adapter."""
    with as_invalid_input():
        check_timeout(timeout_s)
        check_whole("priority", priority, minimum=-_MAX_PRIORITY, maximum=_MAX_PRIORITY)
    if tenant is not None and not (isinstance(tenant, str) and tenant):
        raise InvalidInput(f"tenant is {tenant!r}, it must be a non-empty string")
    if tenant is not None:
        with as_invalid_input():
            check_name("tenant", tenant)
    lora = one_adapter(adapter, lora_request)
    return {
        "priority": priority,
        "tenant": tenant,
        "cache_salt": cache_salt,
        "timeout_s": timeout_s,
        "adapter": None if lora is None else lora.name,
    }
