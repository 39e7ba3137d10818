"""Images and sounds in messages and prompts: found, and read as bytes within limits. What is in
the bytes is the matter of `frontend/multimodal/`."""

import base64
import binascii
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from frontend.errors import InvalidInput
from frontend.multimodal.fetching import FETCH_S, MediaHost, fetch
from frontend.shared_threads import MEDIA, OWN_TEMPLATES

T = TypeVar("T")

MAX_MEDIA_BYTES = 64 * 1024**2
"""Most bytes of one file, before it is decoded."""
_KINDS = {
    "image": "image", "image_url": "image", "image_pil": "image", "input_image": "image",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
"""Of parts of a message, and what they hold: OpenAI's, vLLM's and transformers'."""
_NOT_SERVED = frozenset(
    {"video", "video_url", "image_embeds", "audio_embeds", "file", "input_file", "document"}
)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a sound that was not read yet."""

    modality: str
    source: Any
    """Bytes, a URL, a path, or an object of Python's: an image of Pillow's, (samples, rate)."""
    name: str
    """The item's name in errors."""


@dataclass(frozen=True, slots=True)
class MediaSources:
    """Where files may be that prompts only name: below a folder, at hosts; by default nowhere."""

    folder: Path | None = None
    hosts: tuple[MediaHost, ...] = ()

    @classmethod
    def of(cls, path: str | os.PathLike[str] | None, hosts: str | Sequence[str]) -> "MediaSources":
        """Of `allowed_local_media_path`, in which "" and None allow no file, and `allow_media_url`.
        Raises InvalidInput: it is no folder, or no host."""
        if path and not Path(path).is_dir():
            raise InvalidInput(
                f"allowed_local_media_path is {str(path)!r}, which is no folder; give one, or omit "
                "it"
            )
        named = (hosts,) if isinstance(hosts, str) else hosts
        return cls(Path(path).resolve() if path else None, tuple(map(MediaHost.of, named)))


async def in_thread(call: Callable[[], T], *, decodes: bool) -> T:
    """What `call` returns, in a thread that owners of requests share.
    Raises QueueFull: see `SharedThreads.run`."""
    return await (MEDIA if decodes else OWN_TEMPLATES).run(call)


def has_media(messages: object) -> bool:
    return isinstance(messages, Sequence) and any(
        isinstance(part, Mapping) and _kind(part) in _KINDS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


def _kind(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    return kind if isinstance(kind, str) else None


def split_media(
    messages: Sequence[Mapping[str, Any]], part_of: Callable[[str], Mapping[str, str]]
) -> tuple[list[Mapping[str, Any]], list[MediaItem]]:
    """Messages as templates take them, and what they hold, in order.

    Args:
        part_of: of a modality, as templates take it, with a "placeholder" for those of text only.

    Raises:
        InvalidInput: a part that holds something else, or nothing.
    """
    items: list[MediaItem] = []
    found: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            found.append(message)
            continue
        parts: list[Any] = []
        for part in content:
            kind = _kind(part) if isinstance(part, Mapping) else None
            if kind in _NOT_SERVED:
                raise InvalidInput(
                    f"message {index} has a part of type {kind!r}, which this engine does not "
                    "take; send images and sounds"
                )
            if kind is None or kind not in _KINDS:
                parts.append(part)
                continue
            modality = _KINDS[kind]
            items.append(MediaItem(modality, _source(part, kind, index), f"{kind} {len(items)}"))
            parts.append(part_of(modality))
        found.append({**message, "content": parts})
    return found, items


def _source(part: Mapping[str, Any], kind: str, index: int) -> object:
    value = part.get(kind)
    if kind == "input_image":
        value = part.get("image_url")
    elif kind in ("image", "audio") and value is None:  # transformers' other names
        value = next((part[key] for key in ("url", "path", "base64") if part.get(key)), None)
        if isinstance(value, str) and value == part.get("base64"):
            return _decoded(value, f"the part of type {kind!r} in message {index}")
    if isinstance(value, Mapping):
        if kind == "input_audio":
            return _decoded(value.get("data"), f"input_audio.data of message {index}")
        value = value.get("url")
    if value is None or (isinstance(value, str) and not value):
        raise InvalidInput(
            f"message {index} has a part of type {kind!r} that holds nothing; give it one, such as "
            "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"
        )
    return value


def items_of(data: object) -> list[MediaItem]:
    """Of vLLM's `multi_modal_data`: {"image": one or several, "audio": one or several}.
    Raises InvalidInput: of another form, or a modality that is not known."""
    if not isinstance(data, Mapping):
        raise InvalidInput(
            f"multi_modal_data is {type(data).__name__}; give {{'image': ...}} or {{'audio': ...}}"
        )
    items = []
    for modality, given in data.items():
        if modality not in ("image", "audio"):
            raise InvalidInput(
                f"multi_modal_data has {modality!r}, which this engine does not take; known are "
                "'image' and 'audio'"
            )
        several = given if isinstance(given, list) else [given]
        items += [MediaItem(modality, one, f"{modality} {n}") for n, one in enumerate(several)]
    return items


def read_media(item: MediaItem, sources: MediaSources, seconds: float = FETCH_S) -> object:
    """The bytes of an item; an object of Python's as it is.

    Args:
        seconds: for a file that is fetched.

    Raises:
        InvalidInput: too many bytes or seconds, a file or host outside of `sources`.
    """
    source = item.source
    if isinstance(source, os.PathLike):
        return _file(Path(source), item.name, sources.folder)
    if not isinstance(source, str):
        if isinstance(source, bytes | bytearray | memoryview):
            _check_bytes(len(source), item.name)
        return source
    if source.startswith("data:"):
        head, comma, data = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidInput(
                f"the data URL of {item.name} begins with {head[:60]!r}; it must be of the form "
                "data:image/png;base64,..."
            )
        return _decoded(data, item.name)
    scheme = urlsplit(source[:4096]).scheme.lower() if ":" in source[:16] else ""
    if scheme in ("http", "https"):
        return fetch(source, item.name, sources.hosts, seconds=seconds, max_bytes=MAX_MEDIA_BYTES)
    if scheme in ("ftp", "s3", "gs"):
        raise InvalidInput(
            f"{item.name} is at {source[:100]!r}, and only http and https are fetched; send the "
            f"file itself, as data:{item.modality}/...;base64,..."
        )
    path = unquote(urlsplit(source).path) if scheme == "file" else source
    return _file(Path(path), item.name, sources.folder)


def _file(path: Path, name: str, allowed: Path | None) -> bytes:
    """Raises InvalidInput; its text does not say what is outside of `allowed`."""
    if allowed is None:
        raise InvalidInput(
            f"{name} is the file {str(path)[:100]!r}, and files are not read; send it as a data "
            "URL, or allow a folder with --allowed-local-media-path (allowed_local_media_path)"
        )
    try:
        real = path.resolve(strict=False)
        if not real.is_relative_to(allowed):
            raise InvalidInput(
                f"{name} is the file {str(path)[:100]!r}, which is not below "
                f"--allowed-local-media-path {str(allowed)!r}; move it there, or send a data URL"
            )
        with os.fdopen(os.open(real, os.O_RDONLY | _CAREFUL), "rb") as it:
            if not stat.S_ISREG(os.fstat(it.fileno()).st_mode):
                raise InvalidInput(f"{name} is {str(path)[:100]!r}, which is no file; give a file")
            _check_bytes(os.fstat(it.fileno()).st_size, name)
            data = it.read(MAX_MEDIA_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidInput):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"{name} {str(path)[:100]!r} cannot be read: {why}") from None
    _check_bytes(len(data), name)
    return data


def _decoded(data: object, name: str) -> bytes:
    if not isinstance(data, str):
        raise InvalidInput(f"{name} is {type(data).__name__}, it must be base64 text")
    _check_bytes(len(data) * 3 // 4 - 2, name)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{name} is no base64 ({error}); encode the whole file") from None


# Windows has the last alone
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"))
"""A pipe or a device is not waited for, and the name is one that was resolved."""


def _check_bytes(number: int, name: str) -> None:
    if number > MAX_MEDIA_BYTES:
        raise InvalidInput(
            f"{name} has {number} bytes, the limit is {MAX_MEDIA_BYTES}; send a smaller file"
        )
