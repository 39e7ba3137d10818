"""What a client knows of its engines' caches and of the load that others put on them."""

import asyncio
import contextlib
import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from frontend.engine.session import EngineSession
from frontend.errors import EngineClientError
from frontend.fleet.prefix_index import PrefixIndex
from frontend.request_state import RequestState
from protocol.block_hashes import block_keys, isolated_salt, root_hash
from protocol.cache_events import BlockNaming, CacheEvents
from protocol.calls import WatchCache


class CacheView:
    """Each engine is asked to tell of its cache (WatchCache) when it is connected, and again when
    events are lost. One that does not tell, for want of an admin's key, is taken to keep what it is
    sent until this forgets it."""

    def __init__(self, sessions: Sequence[EngineSession]) -> None:
        self._sessions = sessions
        self.index = PrefixIndex()
        self.others_loads: Counter[int] = Counter()
        """Loads that other clients have put on engines, in tokens, as `load_of`."""
        self.num_snapshots: Counter[int] = Counter()
        """Times that an engine told all that it holds."""
        self.num_gaps: Counter[int] = Counter()
        """Times that events were lost."""
        self._namings: dict[int, BlockNaming] = {}
        self._numbers: dict[int, int] = {}
        """Numbers of the next events; without one those with all are awaited."""
        self._asking: dict[int, asyncio.Task[None]] = {}

    def on_connected(self, engine: int, *, is_new: bool) -> None:
        if is_new:
            self.index.clear(engine)
            self._namings.pop(engine, None)
        self.others_loads[engine] = 0
        self._ask(engine)

    def forget(self, engine: int) -> None:
        """Its number is another engine's from now on."""
        self.index.clear(engine)
        counts = (self.others_loads, self.num_snapshots, self.num_gaps)
        for each in (*counts, self._namings, self._numbers):
            each.pop(engine, None)

    def on_events(self, engine: int, events: CacheEvents) -> None:
        if events.naming is not None:
            self._namings[engine] = events.naming
            self.num_snapshots[engine] += 1
        elif events.number != self._numbers.get(engine):
            if engine in self._numbers:
                self.num_gaps[engine] += 1
                self._ask(engine)
            return
        self._numbers[engine] = events.number + 1
        self.others_loads[engine] = events.others_load
        is_whole = events.naming is not None
        self.index.update(engine, events.stored, events.removed, is_whole=is_whole)

    def _ask(self, engine: int) -> None:
        self._numbers.pop(engine, None)
        if engine in self._asking:
            self._asking[engine].cancel()
        self._asking[engine] = asyncio.create_task(self._watch(engine))

    async def _watch(self, engine: int) -> None:
        with contextlib.suppress(EngineClientError):  # refused, or lost again
            await self._sessions[engine].call(WatchCache())

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    # a prompt

    def prompt(self, request: RequestState, engines: Iterable[int]) -> "dict[int, PromptBlocks]":
        """A prompt's blocks, by these engines' names for them."""
        blocks: dict[int, PromptBlocks] = {}
        known: dict[tuple[BlockNaming, str | None], PromptBlocks] = {}
        for engine in engines:
            session = self._sessions[engine]
            assert session.welcome is not None
            naming = self._namings.get(engine)
            if naming is None:
                naming = BlockNaming(block_size=session.welcome.model.block_size)
            adapter = session.adapters.get(request.wire.adapter or "")
            if (naming, adapter) not in known:
                known[naming, adapter] = _prompt_blocks(request, naming, adapter)
            blocks[engine] = known[naming, adapter]
        return blocks

    def matched(self, blocks: "dict[int, PromptBlocks]") -> dict[int, int]:
        """How many of the prompt's tokens are cached there, by engine."""
        found: dict[int, int] = {}
        for named in {id(each): each for each in blocks.values()}.values():
            engines = [engine for engine, each in blocks.items() if each is named]
            for engine, length in self.index.match(named.keys, engines).items():
                found[engine] = length * named.block_size
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class PromptBlocks:
    block_size: int
    keys: list[int]
    """Keys of its whole blocks."""


def _prompt_blocks(request: RequestState, naming: BlockNaming, adapter: str | None) -> PromptBlocks:
    wire, salt = request.wire, request.wire.cache_salt
    if naming.nonce is not None:
        salt = isolated_salt(naming.nonce, wire.tenant or naming.tenant, salt)
    root = root_hash(adapter=adapter, cache_salt=salt, weights=naming.weights)
    tokens = array("i", wire.prompt_token_ids).tobytes()
    keys = block_keys(root, tokens, naming.block_size)
    starts = [each.start for each in wire.multimodal_inputs]
    starts += [each.start for each in wire.prompt_embeds]
    if starts:
        # from there on the engine's names have its own hash of the contents: these are only those
        # that were sent before
        contents = blake2b(root)
        for frame in request.frames:
            contents.update(frame)
        num_exact = min(starts) // naming.block_size
        sent = block_keys(contents.digest(), tokens, naming.block_size)
        keys[num_exact:] = sent[num_exact:]
    return PromptBlocks(naming.block_size, keys)
