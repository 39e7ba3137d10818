"""Where a prompt differs from the one before it, for clients whose prompts change early each turn:
the cache holds nothing of what stands behind. Looked for when somebody asks."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import PromptChange

_Tokens = npt.NDArray[np.uint32]

_MOST_PROMPTS = 64
_MOST_TOKENS = 2**20
"""Tokens of all prompts that are kept, 4 bytes each."""
_CHUNK = 16
_NEAR = 2048
"""Tokens behind a difference within which the prompts must be equal again."""
_LEAST = 64
"""Equal tokens behind a difference that are worth telling."""
_SHOWN_BEFORE, _SHOWN_BEHIND = 24, 8


class _Kept(NamedTuple):
    owner: object
    tokens: _Tokens


class PromptChanges(SchedulerPart):
    """The last prompts, and a comparison with them."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_tokens = 0

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        if not request.generates or request.num_prompt_tokens > _MOST_TOKENS:
            return
        if (old := self._kept.pop(request.request_id, None)) is not None:
            self._num_tokens -= len(old.tokens)
        self._kept[request.request_id] = _kept(request)
        self._num_tokens += request.num_prompt_tokens
        while len(self._kept) > _MOST_PROMPTS or self._num_tokens > _MOST_TOKENS:
            _, dropped = self._kept.popitem(last=False)
            self._num_tokens -= len(dropped.tokens)

    def id_of(self, begin: str) -> str:
        """The id of the newest request whose id goes on from `begin`, as those of a server go on
        from what it tells its clients; `begin` itself if there is none."""
        ids = (*self._kept, *self._pool.by_id)
        return next((each for each in reversed(ids) if each.startswith(f"{begin}-")), begin)

    def of(self, request_id: str) -> PromptChange | None:
        """The first token that differs from the most similar of the same caller's prompts that
        finished before. None: that one goes on in this one, or is another conversation."""
        request = self._pool.by_id.get(request_id)
        asked = self._kept.get(request_id) if request is None else _kept(request)
        if asked is None:
            return None
        at, before = 0, None
        for name, each in self._kept.items():
            if name == request_id:
                break
            if each.owner == asked.owner and (num := _num_equal(each.tokens, asked.tokens)) >= at:
                at, before = num, each.tokens
        if before is None or (num_same := _num_equal_behind(before, asked.tokens, at)) < _LEAST:
            return None
        return PromptChange(
            position=at,
            num_same=num_same,
            before=asked.tokens[max(0, at - _SHOWN_BEFORE) : at].tolist(),
            was=before[at : at + _SHOWN_BEHIND].tolist(),
            now=asked.tokens[at : at + _SHOWN_BEHIND].tolist(),
        )


def _kept(request: Request) -> _Kept:
    """A view of its prompt, which is never changed."""
    owner = request.scope, request.message.tenant or request.client_index
    return _Kept(owner, np.frombuffer(request.prompt, np.uint32))


def _num_equal(one: _Tokens, other: _Tokens) -> int:
    """The length of their common prefix."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


def _num_equal_behind(before: _Tokens, now: _Tokens, at: int) -> int:
    """How many tokens in a row are equal again, soon behind position `at`.

    before  a a a a X X b b b b b b
    now     a a a a Y b b b b b b c c
            at ────^  ^──────── 6
    """
    text = now[at : at + 2 * _NEAR].tobytes()
    for start in range(at, min(at + _NEAR, len(before) - _CHUNK + 1), _CHUNK):
        place = text.find(before[start : start + _CHUNK].tobytes())
        if place >= 0 and place % now.itemsize == 0:
            return _num_equal(before[start:], now[at + place // now.itemsize :])
    return 0
