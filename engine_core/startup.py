"""Starts the engine from its options: device, files, weights, sizes, parts, in this order.

Owns that order and the errors' way to the operator. Nothing here runs after start-up.
"""

import logging

import torch

from engine_core.config import EngineConfig
from engine_core.config_resolution import plan_runner, resolve_config
from engine_core.core import EngineCore
from engine_core.device_choice import choose_device, choose_dtype
from engine_core.engine_assembly import assemble
from engine_core.errors import StartupError
from engine_core.lifecycle import Lifecycle
from engine_core.model_files import ConfigOnly, ModelFiles, ModelFilesError, open_model_files
from engine_core.model_loading import LoadedModel, LoadRequest, load_any_model
from engine_core.models import ModelError
from engine_core.options import EngineOptions
from engine_core.transport import EngineSocket
from kernels.compile_counter import CompileCounter, watch_triton

logger = logging.getLogger(__name__)


def start_engine(
    options: EngineOptions, socket: EngineSocket, lifecycle: Lifecycle
) -> tuple[EngineCore, EngineConfig]:
    """Load the model and build everything around it.

    Raises:
        StartupError: with one line for the operator.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = choose_device(options.device)
    options.check_device(device.type)
    try:
        files = _open(options)
        compilations = CompileCounter()
        loaded = _load(options, files, device)
        if loaded.ops.device.type == "cuda":
            watch_triton(compilations)  # for as long as this process lives
        runner = plan_runner(options, files, loaded)
        config = resolve_config(options, files, runner, address=socket.address)
        logger.info("configuration: %s", config)
        return assemble(files, runner, config, socket, lifecycle, compilations), config
    except (ModelFilesError, ModelError) as error:
        raise StartupError(str(error)) from error
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise StartupError(
            f"the GPU has not enough memory for the weights and the largest step ({reason}); lower "
            "--max-num-batched-tokens or --max-num-seqs, free the GPU, or serve a smaller model"
        ) from error


def _open(options: EngineOptions) -> ModelFiles:
    if options.load_format == "dummy":
        assert options.model_config is not None, "EngineOptions.check was not called"
        return ConfigOnly(options.model_config)
    assert options.model is not None, "EngineOptions.check was not called"
    return open_model_files(options.model, tokenizer=options.tokenizer, report=logger.info)


def _load(options: EngineOptions, files: ModelFiles, device: torch.device) -> LoadedModel:
    return load_any_model(
        files,
        LoadRequest(
            device=device,
            dtype=choose_dtype(options.dtype, device, files.config),
            model_impl=options.model_impl,
            load_format=options.load_format,
            max_model_len=options.max_model_len,
            batch_invariant=options.batch_invariant,
        ),
    )
