"""Starts the engine from its options and an open model: device, weights, sizes, parts, in order.

Owns that order and the errors' way to the operator. Nothing here runs after start-up.
"""

import logging

import torch

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import StartupError
from engine_core.lifecycle import Lifecycle
from engine_core.model_files import ModelFiles, ModelFilesError
from engine_core.model_files.known_models import cache_folder
from engine_core.models import ModelError
from engine_core.options.engine import EngineOptions
from engine_core.server.transport import ZmqTransport
from engine_core.startup.build import assemble
from engine_core.startup.device import (
    choose_device,
    choose_dtype,
    float_weights_of,
    keeps_blocks,
)
from engine_core.startup.model_loading import LoadedModel, LoadRequest, load_any_model
from engine_core.startup.model_opening import OpenModel
from engine_core.startup.packed_weight_cache import DEFAULT_LIMIT_BYTES, PackedWeightCache
from engine_core.startup.phases import StartPhases
from engine_core.startup.resolve import plan_runner, resolve_config
from kernels.compile_counter import CompileCounter, watch_triton

logger = logging.getLogger(__name__)


def start_engine(
    options: EngineOptions,
    opened: OpenModel,
    transport: ZmqTransport,
    lifecycle: Lifecycle,
    clock: StartPhases,
) -> tuple[EngineCore, EngineConfig]:
    """Load the model and build everything around it.

    Raises:
        StartupError: with one line for the operator.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = choose_device(options.device)
    options.check_device(device.type)
    files = opened.files
    try:
        clock.enter("weights")
        compilations = CompileCounter()
        loaded = load_by_options(options, files, device)
        if loaded.ops.device.type == "cuda":
            watch_triton(compilations)  # for as long as this process lives
        if loaded.is_packed:
            # what is left to torch is small, and its threads would take turns on the same cores
            # with those of the native library
            torch.set_num_threads(1)
        clock.enter("cache")
        runner = plan_runner(options, files, loaded)
        config = resolve_config(options, files, runner, address=transport.address)
        logger.info("configuration: %s", config)
        core = assemble(opened, runner, config, transport, lifecycle, compilations, clock)
        return core, config
    except (ModelFilesError, ModelError) as error:
        raise StartupError(str(error)) from error
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise StartupError(
            f"the GPU has not enough memory for the weights and the largest step ({reason}); lower "
            "--max-num-batched-tokens or --max-num-seqs, free the GPU, or serve a smaller model"
        ) from error


def load_by_options(options: EngineOptions, files: ModelFiles, device: torch.device) -> LoadedModel:
    """The model as the options ask for it, in the formats that the daemon would serve.

    Raises:
        StartupError: as `load_any_model`.
    """
    return load_any_model(
        files,
        LoadRequest(
            device=device,
            dtype=choose_dtype(options.dtype, device, files.config),
            model_impl=options.model_impl,
            load_format=options.load_format,
            max_model_len=options.max_model_len,
            batch_invariant=options.batch_invariant,
            float_weights=float_weights_of(options.quantization),
            keeps_blocks=keeps_blocks(options.quantization, options.dtype),
            num_threads=options.num_threads,
            weight_cache=_weight_cache(options, device),
        ),
    )


def _weight_cache(options: EngineOptions, device: torch.device) -> PackedWeightCache | None:
    if device.type != "cpu":
        return None  # a GPU's layouts are made at once, on the device
    limit = DEFAULT_LIMIT_BYTES if options.weight_cache is None else options.weight_cache
    return PackedWeightCache(cache_folder() / "weights", limit)
