"""What a start does before it imports torch: its largest library is loaded beside, and the model's
files are opened, so that a wrong name or a broken file ends the start early."""

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigurationError, StartupError
from engine_core.installation import files_are_gone
from engine_core.layers import MAX_POSITIONS
from engine_core.options.engine import EngineOptions
from protocol.memory import available_memory_bytes

if TYPE_CHECKING:
    from engine_core.model_files import ModelFiles, TokenizerFiles
    from engine_core.startup.pooled_files import PooledFiles

logger = logging.getLogger(__name__)

_LIBRARY = "libtorch_cpu.so"
_OF_A_GPU = ("libtorch_cuda.so", "libtorch_hip.so")


def check_kernels_package() -> None:
    """Raises StartupError: Hugging Face's distribution `kernels` is installed, or was. Its package
    has the name of ours: one hides, or overwrites, the other, and takes it along when it goes."""
    from importlib.metadata import PackageNotFoundError, distribution

    spec = importlib.util.find_spec("kernels")
    found = "" if spec is None or spec.origin is None else spec.origin
    ours = Path(__file__).parents[2] / "kernels" / "__init__.py"
    try:
        version = distribution("kernels").version
    except PackageNotFoundError:
        if not ours.is_file():
            raise StartupError(files_are_gone(str(ours))) from None
        if not found or Path(found).resolve() == ours.resolve():
            return
        version = f"at {Path(found).parent}"
    raise StartupError(
        f"the distribution `kernels` of Hugging Face ({version}) is installed beside engine-core, "
        "whose own package `kernels` it hides or overwrites; run `pip uninstall kernels "
        "engine-core`, then install engine-core again, or use a virtual environment of its own"
    )


def has_nvidia_driver(system: Path = Path("/")) -> bool:
    """Whether the system has a driver for NVIDIA GPUs. `system`: the root of its files."""
    return any((system / place).exists() for place in ("dev/nvidia0", "proc/driver/nvidia/version"))


def are_gpus_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all of them, on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def load_torch_library_beside() -> threading.Thread | None:
    """Let a thread map and relocate torch's largest library while this one reads and imports.

    That takes a fifth of a second, in which `import torch` would hold the interpreter's lock. A
    build for GPUs is left alone: its libraries are found by rules of its own.
    Returns the thread, which needs no join, or None where there is no such library."""
    library = _torch_library()
    if library is None:
        return None
    # The system's loader takes one library at a time: what is imported beside it must have none
    # left to load, and these are all that come with their own.
    import csv  # noqa: F401

    import numpy  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers

    # its first use in a thread registers a destructor, for which the loader's lock is taken
    tokenizers.Tokenizer.from_str(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())

    # No daemon thread: an early exit waits for it rather than end the process under the loader.
    thread = threading.Thread(target=_load, args=(library,), name="load-torch")
    thread.start()
    return thread


def touch_weight_memory(
    options: EngineOptions, files: "ModelFiles", after: threading.Thread | None
) -> None:
    """Let a thread touch the memory of weights that will be packed, as `WeightMemory` says, where
    that is certain before torch is asked: on a CPU, for floats.
    `after`: begin when this thread has ended; None: torch may find a GPU."""
    quantization, named = options.quantization, options.dtype
    is_kept = named == "auto" and quantization != "none" and bool(files.quantised_types)
    if (
        not (options.device == "cpu" or (options.device == "auto" and after is not None))
        or options.load_format == "dummy"
        or options.model_impl == "transformers"
        or options.parallel.num_workers > 1
        or options.numa is not None  # the threads that pack them do
        or quantization in ("int8", "int4")
        or named == "float16"
        or is_kept
    ):
        return
    from kernels.cpu.weight_memory import WEIGHT_MEMORY

    # of `auto` no more is known than that a weight has at least 16 bits
    least_bytes, most_bytes = {"float32": (4, 4), "bfloat16": (2, 2)}.get(named, (2, 4))
    num_weights = files.num_weights * 65 // 64  # panels are padded
    num_bytes = min(num_weights * least_bytes, available_memory_bytes() // 2)
    WEIGHT_MEMORY.touch_ahead(num_bytes, needed_bytes=num_weights * most_bytes, after=after)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is searched for cycles; what exists at the end is never searched.

    Imports make 300,000 objects, nearly all for good: the collector would walk them over and
    over, a tenth of the start, and later stop a step for a tenth of a second. Not for work that
    may leave tensors in cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _load(library: Path) -> None:
    # called as a function: `ctypes.CDLL(library)` would hold the interpreter's lock meanwhile.
    # A failure is left to `import torch`, which says it better
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)


def _torch_library() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    if any((folder / name).exists() for name in _OF_A_GPU):
        return None
    library = folder / _LIBRARY
    return library if library.is_file() else None


@dataclasses.dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's files and what its clients need of them; None: they must send token ids."""

    files: "PooledFiles"
    tokenizer: "TokenizerFiles | None"


def open_model(options: EngineOptions) -> OpenModel:
    """The model's files as the options name them, with the tokenizer built.
    Raises StartupError: with one line for the operator."""
    from engine_core.model_files import ConfigOnly, ModelFilesError, open_model_files, unreadable
    from engine_core.startup.pooled_files import pooled_files

    try:
        files: ModelFiles
        if options.load_format == "dummy":
            assert options.model_config is not None, "EngineOptions.check was not called"
            files = ConfigOnly(options.model_config)
        else:
            assert options.model is not None, "EngineOptions.check was not called"
            given = options.multimodal
            files = open_model_files(
                options.model,
                tokenizer=options.tokenizer,
                mmproj=given.mmproj,
                finds_mmproj=not given.language_model_only,
                report=logger.info,
            )
        _check_formats(options, files)
        if options.max_model_len is not None:
            _check_length(options.max_model_len, files.config)
        pooled = pooled_files(files, options.pooling)
        tokenizer = files.tokenizer()
    except ModelFilesError as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(unreadable(error)) from error
    if tokenizer is None:
        logger.warning("the model has no tokenizer: clients must send token ids")
    return OpenModel(pooled, tokenizer)


def _check_length(max_model_len: int, config: Mapping[str, Any]) -> None:
    """Raises ConfigurationError: --max-model-len is beyond what the config says, or any model's."""
    from engine_core.models.config_names import size_in

    made_for = size_in(config, "max_position_embeddings")
    if made_for is not None and max_model_len > made_for:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, the model was made for {made_for}; lower it"
        )
    if max_model_len > MAX_POSITIONS:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, this engine has {MAX_POSITIONS} positions; "
            "lower it"
        )


_TYPES_OF: dict[str, set[str]] = {
    "gguf": {"gguf"},
    "awq": {"awq"},
    "gptq": {"gptq", "gptq_v2"},
    "fp8": {"fp8"},
    "mxfp4": {"mxfp4"},
    "compressed-tensors": {"w4a16", "w8a16", "w8a8", "fp8", "nvfp4", "mxfp4"},
    "modelopt": {"fp8", "nvfp4"},
    "auto-round": {"gptq", "gptq_v2", "awq"},
    "bitsandbytes": {"bnb"},
}
"""Beginnings of the names of types that a folder of a method may hold."""


def _check_formats(options: EngineOptions, files: "ModelFiles") -> None:
    """Refuse files of another kind than the options name."""
    is_folder = files.path.is_dir() or options.load_format == "dummy"
    kind = "safetensors" if is_folder else "gguf"
    if options.load_format not in ("auto", "dummy", kind):
        raise StartupError(
            f"--load-format {options.load_format}: the weights of {files.path} are {kind}; use "
            "auto, or name another model"
        )
    named = options.quantization
    if (wanted := _TYPES_OF.get(named)) is None:
        return
    methods = {"gguf"} if not is_folder else {t.partition("-")[0] for t in files.quantised_types}
    if not wanted & methods:
        raise StartupError(
            f"--quantization {named}: the weights of {files.path} are "
            f"{' and '.join(sorted(methods)) or 'not quantised'}; use auto, or name another model"
        )


def share_the_cores() -> None:
    """Let idle OpenMP threads sleep soon. Must come before torch is imported.

    They spin between operations, by default for milliseconds. When another process needs a core,
    the spinning threads take it from the thread that has work: a decode step then takes a hundred
    times as long. At this count it takes three times as long, and 5 to 10 % more on an idle
    machine (docs/benchmarks.md). Variables that are set already are left alone."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
