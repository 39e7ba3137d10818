"""The models that a server serves, by the names that requests give."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from frontend.async_llm import AsyncLLM
from frontend.engine_calls import Engine
from frontend.fleet.engine_group import EngineGroup
from frontend.http.api_errors import ApiError, not_supported, unknown_model
from frontend.http.exchange import current_exchange
from frontend.http.request_histograms import RequestHistograms
from frontend.multimodal.media import MediaSources
from frontend.presets.llm import PresetLLM, names_of
from protocol.known_names import meant_by
from protocol.presets import (
    ADAPTER_PREFIX,
    Preset,
    PresetError,
    all_presets,
    find_preset,
    model_of,
    preset_file,
    warn_once,
)
from protocol.running_daemons import running_daemons

_BATCH_PRIORITY = 1000
"""What lines of batches wait behind: every request that asks for no priority."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model that does not run, named as in `ModelInfo`; the rest is empty."""

    name: str = ""
    architecture: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    num_weights: int = 0
    file_bytes: int = 0
    file_format: str = ""
    formats: str = ""
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, float] = {}
    tasks: tuple[str, ...] = ()
    takes_images: bool = False
    chat_template: str = ""
    chat_templates: dict[str, str] = {}
    """Others, by their names."""


class ServedModel:
    """One engine, or several that serve one model, and its names. Engines may come later, go, and
    come back.

    Args:
        make_client: an unconnected client of it.
        names: default: the engine's own.
    """

    def __init__(self, make_client: Callable[[], AsyncLLM], names: Sequence[str] = ()) -> None:
        self._make_client = make_client
        self._client: AsyncLLM | None = None
        self._opening = asyncio.Lock()
        self._names = tuple(names)
        self.histograms = RequestHistograms()
        """Histograms of its requests."""
        self.created_s = int(time.time())
        self.facts: ModelFacts | None = None
        """Facts that were read of its files while it did not run."""
        self.size_bytes = 0
        """Bytes of its files; 0: not known."""
        self.asked: list[str] = []
        """Names that its daemons were started with, see `names_of`."""
        self.presets: dict[str, PresetLLM] = {}
        """Clients through presets that were asked for, by their names."""

    @property
    def names(self) -> tuple[str, ...]:
        """None before the engine has been reached, unless given."""
        if self._names or self._client is None:
            return self._names
        return (self._client.model.name,)

    @property
    def adapters(self) -> list[str]:
        """Names of its adapters, which requests may give for the model's."""
        given = [] if self._client is None else self._client.adapters
        others = [name for name in given if not name.startswith(ADAPTER_PREFIX)]
        return [name for name in others if name not in self.names]

    def is_of(self, model: str) -> bool:
        """Whether presets of `model` are presets of this one."""
        known = () if self._client is None else (self._client.model.name,)
        return meant_by(model) in map(meant_by, (*self.names, *self.asked, *known))

    async def source(self) -> str:
        """The model that a preset of this one is of. EngineClientError: no engine answers."""
        if self.resting is None:
            await self.ready()
        return next(iter(self.asked), self.names[0])

    async def ready(self) -> AsyncLLM:
        """The engine's client, connected.

        Raises:
            EngineClientError: it does not answer.
        """
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    client = self._make_client()
                    await client.open()
                    client.session.requests.observer = self.histograms
                    self._client = client
                    for each in running_daemons():
                        if each.address in client.addresses:
                            with contextlib.suppress(PresetError):
                                self.asked += names_of(model_of(each.asked))
        await self._client.ready()
        return self._client

    @property
    def known_engines(self) -> list[Engine]:
        """Each engine, there or not; empty before one has answered."""
        return [] if self._client is None else self._client.engines

    @property
    def group(self) -> EngineGroup | None:
        """Its engines together, where there are several and one has answered."""
        session = None if self._client is None else self._client.session
        return session if isinstance(session, EngineGroup) else None

    async def engines(self) -> list[Engine]:
        """Each engine, there or not. EngineClientError: none has answered yet."""
        return (self._client or await self.ready()).engines

    async def for_request(self) -> AsyncLLM:
        """The engine, `ready` for the request that is being answered."""
        return await self.ready()

    @property
    def resting(self) -> str | None:
        """Where no engine runs because nobody has asked for it: its state. None: ask `ready`."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Memory of its engine; 0: not known."""
        return 0

    @property
    def expires_at(self) -> datetime | None:
        """When its engine is stopped, if nobody uses it. None: never."""
        return None

    async def read_facts(self) -> ModelFacts:
        """Read what its files say, if they are here."""
        return self.facts or ModelFacts(name=self.names[0])

    async def pull(self) -> AsyncGenerator[dict[str, Any], None]:
        """Fetch its files, if they are not here. Yields what is to be said of it: `status`, and of
        downloads `completed` and `total` bytes. Raises ApiError: that failed."""
        for each in list[dict[str, Any]]():
            yield each

    def keep_alive(self, seconds: float, *, by_admin: bool = True) -> None:
        """How long its engine may be idle from now on. Raises ApiError: 0, and it is not one that
        this server stops; or others would pay, and only an admin may."""
        if not seconds:
            raise not_supported("keep_alive", "0", "stop the engine to free its memory")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class ServedPreset(ServedModel):
    """A served model under the name of one of its presets."""

    def __init__(self, name: str, preset: Preset, model: ServedModel) -> None:
        super().__init__(AsyncLLM, [name])  # never called: the client is the model's
        self.preset = preset
        self.model = model
        self.size_bytes, self.facts = model.size_bytes, model.facts
        with contextlib.suppress(OSError):
            self.created_s = int(preset_file(name).stat().st_mtime)

    @property
    def parent(self) -> str:
        """The model's name."""
        return next(iter(self.model.names), "")

    def _through(self, llm: AsyncLLM) -> PresetLLM:
        (name,) = self.names
        kept = self.model.presets.get(name)
        if kept is None or kept.llm is not llm or kept.preset != self.preset:
            kept = self.model.presets[name] = PresetLLM(llm, self.preset)
        return kept

    async def ready(self) -> AsyncLLM:
        return self._through(await self.model.ready())

    async def for_request(self) -> AsyncLLM:
        return self._through(await self.model.for_request())

    @property
    def resting(self) -> str | None:
        return self.model.resting

    async def read_facts(self) -> ModelFacts:
        return await self.model.read_facts()

    def pull(self) -> AsyncGenerator[dict[str, Any], None]:
        return self.model.pull()

    def keep_alive(self, seconds: float, *, by_admin: bool = True) -> None:
        self.model.keep_alive(seconds, by_admin=by_admin)


class ServedModels:
    """
    Args:
        models: the first one is meant where a request names none.
        new: makes a model of the name of one that is to be fetched. None: no other is served.
        default: the preset that is meant instead of the first one.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        new: Callable[[str], ServedModel] | None = None,
        default: str | None = None,
    ) -> None:
        self._models = list(models)
        self.new = new
        self._default = default
        self.media_sources = MediaSources()
        """The folder and the hosts whose files requests may name."""
        self.starts_engines = any(model.resting is not None for model in self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def add(self, model: ServedModel) -> None:
        """Serve it from now on, unless another one has its name."""
        if model not in self._models and not {*model.names} & {*self.names()}:
            self._models.append(model)

    def with_presets(self) -> list[ServedModel]:
        """All that requests may name, but adapters: the models, and the presets of them."""
        taken = {name for model in self._models for name in model.names}
        presets = [
            ServedPreset(name, preset, model)
            for name, preset in all_presets().items()
            for model in [each for each in self._models if each.is_of(preset.from_)][:1]
            if name not in taken
        ]
        return sorted([*self._models, *presets], key=lambda each: self._default not in each.names)

    async def get(self, name: str | None) -> AsyncLLM:
        """The client of the model of this name, which the exchange notes.

        Raises:
            ApiError: there is no such model.
            EngineClientError: its engine does not answer.
        """
        model = await self.find(name)
        llm = await model.for_request()
        (llm.llm if isinstance(llm, PresetLLM) else llm).media_sources = self.media_sources
        exchange = current_exchange.get()
        if exchange is not None:
            exchange.model = name or model.names[0]
            if exchange.is_batch and llm.model.has_priorities:
                exchange.default_priority = _BATCH_PRIORITY
        return llm

    async def find(self, name: str | None) -> ServedModel:
        """Notes in the exchange which adapter the name is. Raises as `get` does."""
        model = await self._find(name)
        exchange = current_exchange.get()
        if exchange is not None:
            exchange.adapter = name if name in model.adapters else None
        return model

    async def _find(self, name: str | None) -> ServedModel:
        name = name or self._default
        if not name and len(self._models) > 1:
            raise ApiError(400, "there is no model; give one of " + ", ".join(self.names()))
        for model in self._models:
            if not name or name in model.names:
                return model
        for model in self._models:
            if name in model.adapters:
                return model
        assert name
        if (found := await self._find_preset(name)) is not None:
            return found
        for model in self._models:  # its name may not be known yet, or another by now
            if model.resting is None:
                await model.ready()
            if name in model.names or name in model.adapters:
                return model
        raise unknown_model(name, self.known_names())

    async def _find_preset(self, name: str) -> ServedModel | None:
        try:
            preset = find_preset(name)
        except PresetError as error:
            warn_once(str(error))
            raise ApiError(500, f"{name!r} cannot be read; see the server's log") from None
        if preset is None:
            return None
        for model in self._models:
            if model.resting is None:
                await model.ready()  # its names may not be known yet
            if model.is_of(preset.from_):
                return ServedPreset(name, preset, model)
        of = Path(preset.from_).name  # callers are told no paths
        raise unknown_model(f"{name} (a preset of {of})", self.known_names())

    def names(self) -> list[str]:
        """All but those of presets."""
        return [name for model in self._models for name in (*model.names, *model.adapters)]

    def known_names(self) -> list[str]:
        return [name for each in self.with_presets() for name in (*each.names, *each.adapters)]

    async def remove(self, models: Sequence[ServedModel]) -> None:
        """Serve these no more."""
        self._models = [each for each in self._models if each not in models]
        await asyncio.gather(*(each.close() for each in models))

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self._models))


def served_models(request: Request) -> ServedModels:
    """The models of the server that answers."""
    found: ServedModels = request.app.state.models
    return found
