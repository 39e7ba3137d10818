"""Presets before an engine: one client of a model serves all presets of it, too."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.input_processor import InputProcessor
from frontend.inputs.prompts import ChatMessage, TokensPrompt
from frontend.outputs import RequestOutput
from frontend.request_options import LoRARequest, adapter_of
from frontend.sampling_params import SamplingParams
from protocol.known_names import meant_by
from protocol.presets import SAMPLING_NAMES, Parameters, Preset, all_presets

_SYSTEM = ("system", "developer")


class PresetLLM(AsyncLLM):
    """Requests for a preset, to the engine of `llm`, and open while that is: with its system text
    where a conversation has none, its messages, template, adapter and length. Callers read its
    `preset_sampling`."""

    def __init__(self, llm: AsyncLLM, preset: Preset) -> None:
        vars(self).update(vars(llm))
        self.llm = llm
        self.preset = preset
        self.preset_sampling = _sampling(preset.parameters)
        self._made: tuple[InputProcessor, InputProcessor] | None = None
        """The engine's, and what became of it."""

    async def ready(self) -> None:
        await self.llm.ready()

    @property
    def input_processor(self) -> InputProcessor:
        own = self.llm.input_processor
        if self._made is None or self._made[0] is not own:
            self._made = own, self._processor(own)
        return self._made[1]

    def _processor(self, own: InputProcessor) -> InputProcessor:
        model, tokenizer = own.model, own.optional_tokenizer
        if (most := self.preset.parameters.num_ctx) is not None:
            length = min(int(most), model.max_model_len)
            model = msgspec.structs.replace(model, max_model_len=length)
        if self.preset.template is not None and tokenizer is not None:
            tokenizer = tokenizer.with_template(self.preset.template)
        return own.of_model(model, tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        return dataclasses.replace(super().get_default_sampling_params(), **self.preset_sampling)

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], **template_options: Any
    ) -> TokensPrompt:
        return await super().chat_prompt(self._conversation(messages), **template_options)

    def _conversation(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        roles = [each.get("role") for each in messages]
        start = next((at for at, role in enumerate(roles) if role not in _SYSTEM), len(roles))
        first = [*messages[:start]]
        if self.preset.system and not set(_SYSTEM) & set(roles):
            first = [{"role": "system", "content": self.preset.system}]
        examples = [msgspec.structs.asdict(each) for each in self.preset.messages]
        return [*first, *examples, *messages[start:]]

    def _with_adapter(self, options: Any) -> Any:
        name = self.preset.adapter_name
        if name is None or adapter_of(options) is not None:
            return options
        return {**options, "lora_request": LoRARequest(name, lora_path=self.preset.adapter or "")}

    def _stream(self, *args: Any, **more: Any) -> AsyncGenerator[RequestOutput, None]:
        prompt, params, request_id, options, *rest = args
        return super()._stream(prompt, params, request_id, self._with_adapter(options), *rest)

    async def pool(self, *args: Any, **more: Any) -> list[RequestOutput]:
        return await super().pool(*args, **self._with_adapter(more))


def _sampling(parameters: Parameters) -> dict[str, Any]:
    given = {SAMPLING_NAMES.get(name, name): value for name, value in parameters.given().items()}
    given.pop("num_ctx", None)
    if given.get("max_tokens", 1) < 1:
        given["max_tokens"] = None  # as many as there is room for
    return given


def names_of(model: str) -> list[str]:
    """What presets may call a model that was asked for so: a path is in full first. Of known names
    also what they mean."""
    path = Path(model).expanduser()
    if path.exists():
        return [str(path.resolve()), str(path.absolute()), model]
    return [model, meant_by(model)]


def adapter_options(model: str) -> list[str]:
    """Options for the daemon of a model: the adapters of its presets, whose files are there."""
    own = [each for each in all_presets().values() if meant_by(each.from_) in names_of(model)]
    found = {each.adapter_name: each.adapter for each in own if each.adapter}
    return [f"--adapter={n}={path}" for n, path in found.items() if Path(path).exists()]
