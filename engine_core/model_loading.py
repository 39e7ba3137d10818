"""Files to a model that runs: our own model code, or transformers' where we have none.

Owns that choice, and which backend the model is made for. Must not know the cache, the scheduler
or sockets.
"""

import dataclasses
import logging
import time
from typing import Literal

import torch

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_files import ModelFiles
from engine_core.models import Model, UnsupportedArchitecture, load_dummy_model, load_model
from engine_core.models.weight_transfer import weight_transfer_to
from kernels.backends import UnsupportedDevice, select_operations
from kernels.interface import Operations

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the backend that it was loaded for."""

    model: Model
    ops: Operations
    dtype: torch.dtype
    architecture: str
    model_impl: str

    def step_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Upper estimate of one step's activations, in bytes.

        Hidden states, projections and the feed-forward's intermediate live one layer at a time
        (about 32 hidden widths a token); logits are float32, with copies for sampling.
        """
        spec = self.model.kv_cache_spec
        hidden_size = spec.num_query_heads * spec.head_size
        per_token = 32 * hidden_size * self.dtype.itemsize
        return max_num_tokens * per_token + max_num_seqs * spec.vocab_size * 4 * 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """How to load.

    Attributes:
        load_format: "dummy" takes random weights of the config's shape instead of the files'.
        max_model_len: most positions that will be used, if fewer than the model has.
        batch_invariant: see `kernels.backends.select_operations`.
    """

    device: torch.device
    dtype: torch.dtype
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    batch_invariant: bool = False


def load_any_model(files: ModelFiles, wanted: LoadRequest) -> LoadedModel:
    """
    Raises:
        StartupError: the device cannot serve, or neither we nor transformers can run the model;
            the message says why.
    """
    started_s = time.monotonic()
    try:
        ops = select_operations(wanted.device, batch_invariant=wanted.batch_invariant)
    except UnsupportedDevice as error:
        raise ConfigurationError(str(error)) from error
    model: Model | None = None
    used_impl = "native"
    if wanted.load_format == "dummy":
        model = _load_dummy(files, wanted, ops)
    elif wanted.model_impl != "transformers":
        try:
            model = load_model(
                files.config,
                files.tensors(),
                dtype=wanted.dtype,
                ops=ops,
                max_model_len=wanted.max_model_len,
                transfer=weight_transfer_to(ops.device),
            )
        except UnsupportedArchitecture as error:
            if wanted.model_impl == "native" or not files.path.is_dir():
                raise StartupError(str(error)) from error
            logger.info("%s; using transformers' model code", error)
    if model is None:
        used_impl = "transformers"
        model = _load_through_transformers(files, wanted.dtype, ops)
    architecture = ", ".join(files.config.get("architectures") or [files.config["model_type"]])
    logger.info("loaded %s in %.1f s", files.name, time.monotonic() - started_s)
    return LoadedModel(model, ops, wanted.dtype, architecture, used_impl)


def _load_dummy(files: ModelFiles, wanted: LoadRequest, ops: Operations) -> Model:
    if wanted.model_impl == "transformers":
        raise ConfigurationError(
            "--model-impl transformers has no effect with --load-format dummy, which makes our own "
            "models; omit one of them"
        )
    logger.warning("the weights of %s are random: its answers mean nothing", files.name)
    try:
        return load_dummy_model(
            files.config, dtype=wanted.dtype, ops=ops, max_model_len=wanted.max_model_len
        )
    except UnsupportedArchitecture as error:
        raise StartupError(str(error)) from error


def _load_through_transformers(files: ModelFiles, dtype: torch.dtype, ops: Operations) -> Model:
    if ops.device.type != "cpu":
        raise StartupError(
            f"{files.name} has no native code, and transformers' model code runs on a CPU only "
            "here; run with --device cpu"
        )
    if not files.path.is_dir():
        raise ConfigurationError(
            f"--model-impl transformers needs a model folder, {files.path} is a file"
        )
    from engine_core.models.transformers_model import load_transformers_model

    return load_transformers_model(files.path, files.config, dtype=dtype, ops=ops)
