"""POST /slots: the last prompt and answer of a slot, in tokens, saved in a file and computed again.
Keys and values are the prefix cache's, which knows no slots."""

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.decoding import decode, read_body
from frontend.http.event_stream import json_response, until_disconnect
from frontend.http.exchange import exchange_of
from frontend.http.generation.answers import TokenCounts, finish_reason
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.sampling_params import RequestOutputKind, SamplingParams
from protocol.outputs import ModelInfo
from protocol.private_files import create_private_file, make_private_folder, open_own_file

_MAX_NAME = 255
_MAX_TOKEN_BYTES = 5
_MAX_HEAD_BYTES = 4096
_NO_NAME = re.compile(
    '[\0-\x1f\x7f-\x9f\ud800-\udfff\uff0e\u2215\u2216\ufffd\ufeff:*?"<>|/\\\\]|^ |[ .]$|\\.\\.'
)
"""Characters and ends that llama.cpp takes in no name of a file."""
_Key = tuple[str | None, int]
"""The owner (see `Exchange`) and number of a slot."""


class SlotFile(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A saved slot, as MessagePack."""

    model: str
    vocabulary: str
    token_ids: list[int]


class SlotAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    filename: str = ""
    model: str | None = None


class SlotChange(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; each action has its own fields."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    """Tokens. So are `n_restored` and `n_erased`; `n_written` and `n_read` are bytes."""
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class SlotTokens(NamedTuple):
    """A slot's last request. `answer` grows while that runs."""

    vocabulary: str
    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def computed(self) -> list[int]:
        """The tokens without the last one of the answer, which no step has read."""
        return [*self.prompt, *self.answer[:-1]]


class Slots(NamedTuple):
    """The slots of a model, an adapter or a preset, the last used at the end."""

    name: str
    tokens: OrderedDict[_Key, SlotTokens]

    def keep(
        self, key: _Key, llm: AsyncLLM, prompt: Sequence[int], answer: Sequence[int] = ()
    ) -> None:
        """Keep this, and of the others as many as there are slots, the last used."""
        self.tokens[key] = SlotTokens(_vocabulary(llm.model), prompt, answer)
        self.tokens.move_to_end(key)
        while len(self.tokens) > llm.model.max_num_seqs * len(llm.engines):
            self.tokens.popitem(last=False)


async def slots_of(request: Request, model: str | None) -> Slots | None:
    """The slots of this name; None: the server keeps none. Raises ApiError: no such model."""
    if request.app.state.settings.slot_save_path is None:
        return None
    found = await served_models(request).find(model)
    name = exchange_of(request).adapter or found.names[0]
    return Slots(name, request.app.state.slots.setdefault(name, OrderedDict()))


@operation("POST", "/slots/{id_slot}", gives=SlotChange)
async def change_slot(request: Request) -> Response:
    """Save a slot's tokens in a file, restore them from one, or erase them (`?action=`)."""
    action, given = request.query_params.get("action", ""), request.path_params["id_slot"]
    if request.app.state.settings.slot_save_path is None:
        what = "this server does not support slots actions; start it with --slot-save-path DIR"
        raise ApiError(501, what)
    if not re.fullmatch("[0-9]{1,9}", given):
        raise ApiError(400, f"invalid slot ID {given!r:.20}, it must be 0 or a number above")
    if action not in ("save", "restore", "erase"):
        what = f"invalid action {action!r:.20}, it must be save, restore or erase"
        raise ApiError(400, what, param="action")
    body = await read_body(request.stream()) or b"{}"
    asked = await decode(msgspec.json.Decoder(SlotAction), body)
    slots = await slots_of(request, asked.model or request.query_params.get("model"))
    assert slots is not None
    key = exchange_of(request).owner, int(given)
    if action == "erase":
        kept = slots.tokens.pop(key, None)
        num_erased = 0 if kept is None else len(kept.computed)
        return json_response(SlotChange(id_slot=key[1], n_erased=num_erased))
    path, began_s = _path(request, asked.filename), time.monotonic()
    work = _save if action == "save" else _restore
    done = await until_disconnect(request, work(request, slots, key, path))
    timings = {f"{action}_ms": 1e3 * (time.monotonic() - began_s)}
    change = SlotChange(id_slot=key[1], filename=asked.filename, timings=timings, **done)
    return json_response(change)


def _path(request: Request, filename: str) -> Path:
    """Each key's files are in a folder of its own."""
    if not 0 < len(filename.encode(errors="replace")) <= _MAX_NAME or _NO_NAME.search(filename):
        what = f"invalid filename {filename!r:.100}; give a name without a folder"
        raise ApiError(400, what, param="filename")
    folder: Path = request.app.state.settings.slot_save_path
    owner = exchange_of(request).owner
    if owner is not None:
        folder /= hashlib.sha256(owner.encode()).hexdigest()
    return folder / filename


async def _save(_request: Request, slots: Slots, key: _Key, path: Path) -> dict[str, int]:
    kept = slots.tokens.get(key)
    if kept is None:
        raise ApiError(400, f"slot {key[1]} is empty; ask /completion with this id_slot first")
    held = SlotFile(model=slots.name, vocabulary=kept.vocabulary, token_ids=kept.computed)
    data = msgspec.msgpack.encode(held)
    try:
        await asyncio.to_thread(_write, path, data, has_owner=key[0] is not None)
    except OSError as error:
        raise ApiError(500, f"unable to save slot to {path.name}: {error.strerror}") from None
    return {"n_saved": len(held.token_ids), "n_written": len(data)}


async def _restore(request: Request, slots: Slots, key: _Key, path: Path) -> dict[str, int]:
    llm = await served_models(request).get(slots.name)
    most_bytes = _MAX_HEAD_BYTES + _MAX_TOKEN_BYTES * llm.model.max_model_len
    try:
        data = await asyncio.to_thread(_read, path, most_bytes)
        held = msgspec.msgpack.decode(data, type=SlotFile)
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no slot that was saved here"
        what = f"unable to restore slot from {path.name}: {why}"
        raise ApiError(400, what, param="filename") from None
    theirs, ours = (held.model, held.vocabulary), (slots.name, _vocabulary(llm.model))
    if theirs != ours:
        what = f"unable to restore slot: {path.name} is of model {' with '.join(theirs)}, not of "
        what += f"{' with '.join(ours)}; name its model, or save another slot"
        raise ApiError(400, what, param="filename")
    session = exchange_of(request).generates_as(session=f"slot {key[1]}")
    params = SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
    counts = TokenCounts()
    async for output in llm.generate({"prompt_token_ids": held.token_ids}, params, **session):
        counts.count(0, output)
        for part in output.outputs:
            finish_reason(part)  # raises what it failed with
    slots.keep(key, llm, held.token_ids)
    return {"n_restored": len(held.token_ids), "n_read": len(data)}


def _vocabulary(info: ModelInfo) -> str:
    tokenizer = "none" if info.tokenizer is None else info.tokenizer.fingerprint
    return f"{info.vocab_size} tokens, tokenizer {tokenizer}"


def _write(path: Path, data: bytes, *, has_owner: bool) -> None:
    """Write all of it, or nothing."""
    if has_owner:
        make_private_folder(path.parent)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with create_private_file(part) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, most_bytes: int) -> bytes:
    """Longer files are cut, and no slots."""
    with open_own_file(path) as file:
        return file.read(most_bytes)
