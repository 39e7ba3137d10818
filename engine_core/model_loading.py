"""Files to a model that runs: our own model code, or transformers' where we have none.

Owns that choice and the dtype. Must not know the cache, the scheduler or sockets.
"""

import dataclasses
import logging
import time

import torch

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_files import ModelFiles
from engine_core.models import Model, UnsupportedArchitecture, load_model
from kernels.backends import select_operations
from kernels.interface import Operations

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def load_any_model(
    files: ModelFiles, *, dtype: str, model_impl: str, max_model_len: int | None
) -> LoadedModel:
    """
    Args:
        dtype: "auto" (float32 on a CPU) or a torch name.
        model_impl: "auto", "native" or "transformers".
        max_model_len: most positions that will be used, if fewer than the model has.

    Raises:
        StartupError: neither we nor transformers can run it; the message says why.
    """
    started_s = time.monotonic()
    ops = select_operations(torch.device("cpu"))
    torch_dtype = _DTYPES.get(dtype, torch.float32)
    model: Model | None = None
    used_impl = "native"
    if model_impl != "transformers":
        try:
            model = load_model(
                files.config,
                files.tensors(),
                dtype=torch_dtype,
                ops=ops,
                max_model_len=max_model_len,
            )
        except UnsupportedArchitecture as error:
            if model_impl == "native" or not files.path.is_dir():
                raise StartupError(str(error)) from error
            logger.info("%s; using transformers' model code", error)
    if model is None:
        used_impl = "transformers"
        model = _load_through_transformers(files, torch_dtype, ops)
    architecture = ", ".join(files.config.get("architectures") or [files.config["model_type"]])
    logger.info("loaded %s in %.1f s", files.name, time.monotonic() - started_s)
    return LoadedModel(model, ops, torch_dtype, architecture, used_impl)


def _load_through_transformers(files: ModelFiles, dtype: torch.dtype, ops: Operations) -> Model:
    if not files.path.is_dir():
        raise ConfigurationError(
            f"--model-impl transformers needs a model folder, {files.path} is a file"
        )
    from engine_core.models.transformers_model import load_transformers_model

    return load_transformers_model(files.path, files.config, dtype=dtype, ops=ops)
