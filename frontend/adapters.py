"""Which adapter a request asks for: by the name that the engine knows, or as vLLM's LoRARequest."""

from dataclasses import dataclass

from frontend.errors import InvalidInput


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


def one_adapter(adapter: str | None, lora_request: LoRARequest | None) -> LoRARequest | None:
    """Of two ways to say it. Raises InvalidInput: both, or neither a name nor a LoRARequest."""
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
