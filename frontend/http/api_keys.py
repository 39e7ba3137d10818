"""API keys: who may ask, under which name, and how much. Only hashes of keys are kept."""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from frontend.errors import InvalidInput

KEY_VARIABLE = "VLLM_API_KEY"
"""The variable of the environment with the operator's key."""
_Count = Annotated[int, Meta(ge=1)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
"""A tenant: a slash would divide its share."""


class ApiKey(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An entry of a file of keys: `key`, which is not kept, or its SHA-256."""

    name: _Name
    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    is_admin: bool = msgspec.field(default=False, name="admin")
    """Whether it may see the requests of others."""
    max_concurrent_requests: _Count | None = None
    requests_per_minute: _Count | None = None
    min_priority: int | None = None
    """The most urgent one that its requests may have."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256 or "")

    def hashed(self) -> "ApiKey":
        """This entry with the key's hash in place of the key."""
        sha256 = self.sha256 if self.key is None else _digest(self.key).hex()
        return msgspec.structs.replace(self, key=None, sha256=sha256)


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(min_length=1)]


class ApiKeys:
    """
    Raises:
        InvalidInput: a name or a key occurs twice.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)
        names = [key.name for key in self._keys]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"two API keys have the name {twice!r}; give each its own")
        if len({key.digest for key in self._keys}) < len(names):
            raise InvalidInput("two names have the same API key; give each its own")

    def find(self, given: str) -> ApiKey | None:
        """The key that was given. Takes as long for a wrong one."""
        digest, found = _digest(given), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def command_line_keys(keys: Sequence[str]) -> list[ApiKey]:
    """Keys of the operator: they may see all requests.

    Raises:
        InvalidInput: an empty one.
    """
    if not all(keys):
        raise InvalidInput("--api-key is empty; give a key, or omit it")
    names = ["api-key", *(f"api-key-{number}" for number in range(2, len(keys) + 1))]
    pairs = zip(names, keys, strict=False)
    return [ApiKey(name=name, key=key, is_admin=True).hashed() for name, key in pairs]


def read_key_file(path: Path) -> list[ApiKey]:
    """Keys of a file `.toml` or `.json`.

    Raises:
        InvalidInput: it cannot be read or is not of that form; or it has keys, not only their
            hashes, and others may read it. A group may read a file of root's, as Kubernetes
            gives a secret to the group of a pod that is not root.
    """
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        status = path.stat()
        entries = decode(path.read_bytes(), type=_KeyFile).keys
    except OSError as error:
        raise InvalidInput(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"--api-key-file: {path}: {error}; see docs/guides/http_limits.md"
        ) from None
    except ValueError:  # the text of the error may hold a part of the file
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise InvalidInput(f"--api-key-file: {path} is not valid {kind}") from None
    mode = stat.S_IMODE(status.st_mode)
    of_others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    for entry in entries:
        if (entry.key is None) == (entry.sha256 is None):
            raise InvalidInput(
                f"--api-key-file: {path}: {entry.name!r} must have either key or sha256"
            )
        if entry.key is not None and mode & of_others:
            raise InvalidInput(
                f"--api-key-file: {path} holds keys, and others may read it (mode {mode:o}); "
                f"chmod 600 {path}, or put hashes (sha256) there"
            )
    return [entry.hashed() for entry in entries]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
