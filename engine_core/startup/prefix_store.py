"""Opens the prefix store for a model and a cache: what its blocks must agree in."""

import hashlib
import json

from engine_core.errors import ConfigurationError
from engine_core.model_files import ModelFiles
from engine_core.model_runner.config import RunnerConfig
from engine_core.options.engine import EngineOptions
from engine_core.prefix_store import BlockFiles, PrefixStore, UnsafeFolder
from engine_core.prefix_store.block_files import KEY_BYTES
from engine_core.startup.model import LoadedModel

DEFAULT_LIMIT_BYTES = 8 << 30
_LEAST_BLOCKS = 16


def open_prefix_store(
    options: EngineOptions, files: ModelFiles, loaded: LoadedModel, runner: RunnerConfig
) -> PrefixStore | None:
    """None if it was not asked for.
    Raises ConfigurationError: the folder is not safe or cannot be used, or has no room."""
    folder = options.prefix_cache_dir
    if folder is None:
        return None
    limit = options.prefix_cache_disk or DEFAULT_LIMIT_BYTES
    layout = runner.layout
    if limit < _LEAST_BLOCKS * layout.block_bytes:
        raise ConfigurationError(
            f"--prefix-cache-disk is {limit} bytes, a block takes {layout.block_bytes}; give room "
            f"for at least {_LEAST_BLOCKS} blocks"
        )
    try:
        block_files = BlockFiles(
            folder.absolute(),
            limit_bytes=limit,
            key=store_key(options, files, loaded, runner),
            group_bytes=layout.group_bytes,
        )
        return PrefixStore(block_files, flush_s=options.drain_timeout)
    except UnsafeFolder as error:
        raise ConfigurationError(f"--prefix-cache-dir: {error}") from error
    except OSError as error:
        raise ConfigurationError(
            f"--prefix-cache-dir: cannot use {folder}: {error.strerror}; choose another folder"
        ) from error


def store_key(
    options: EngineOptions, files: ModelFiles, loaded: LoadedModel, runner: RunnerConfig
) -> bytes:
    """As `cache_key`. Times of change count, because a fingerprint reads only samples of large
    files."""
    times = [file.stat().st_mtime_ns for file in files.weight_files]
    return cache_key(options, files, loaded, runner, times=times)


def cache_key(
    options: EngineOptions,
    files: ModelFiles,
    loaded: LoadedModel,
    runner: RunnerConfig,
    **more: object,
) -> bytes:
    """Of all that decides what bytes the same tokens have in a block: weights, code, dtypes,
    layout, and `more`."""
    parts = more | {
        "weights": [files.fingerprint, loaded.weights, options.quantization],
        "weight_files": [file.stat().st_size for file in files.weight_files],
        "code": [loaded.model_impl, loaded.ops.name, loaded.ops.build],
        "max_model_len": options.max_model_len,  # some rotary scalings go by it
        "dtypes": [str(loaded.dtype), str(runner.kv_dtype)],
        "block": [runner.block_size, *map(repr, runner.layers)],
        "groups": [[group.layers, repr(group.spec)] for group in runner.layout.groups],
    }
    if loaded.draft is not None:
        parts["draft"] = loaded.draft_fingerprint
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
