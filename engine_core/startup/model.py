"""Files to a model that runs: our own model code, or transformers' where there is none of ours."""

import dataclasses
import logging
import time
from functools import partial

import torch

from engine_core.devices import DeviceTraits, traits_of
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_files import ConfigOnly, ModelFiles
from engine_core.model_files.download import cache_folder
from engine_core.model_files.gguf.header import GgmlType
from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.pooling import Pooler
from engine_core.models.config_names import architecture_of
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.interface import Model
from engine_core.models.loading import load_dummy_model, load_model
from engine_core.models.multimodal.interface import MultiModalEncoder
from engine_core.models.weight_transfer import weight_transfer_to
from engine_core.options.checks import check_cpu_experts, check_encoder, check_layers
from engine_core.options.engine import EngineOptions
from engine_core.startup.device import Numbers, choose_numbers, float_weights_on_host, keeps_blocks
from engine_core.startup.pooled_files import PooledFiles
from engine_core.startup.weight_cache import DEFAULT_LIMIT_BYTES, PackedWeightCache
from kernels.backends import UnsupportedDevice, native_bfloat16, select_operations
from kernels.interface.operations import Operations
from kernels.interface.weights import WeightPacking

logger = logging.getLogger(__name__)

_THROUGH_TRANSFORMERS = "transformers' model code computes in float32"
_FLOAT_FORMATS = frozenset({"float32", "float16", "bfloat16", "int8", "int4"})
_WEIGHT_ONLY = "-w8a16"
_FIRST_EXPERTS = "model.layers.0.mlp"
_GROUP_INPUTS = 32
"""Inputs that share a scale in weights that are quantised here."""
_LARGE_GROUP_INPUTS = 128
"""Inputs of a group in folders that others quantised, as a rule."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the backend that it was loaded for.

    Attributes:
        weights: formats of the layers' weights, the one with most bytes first.
        is_packed: on a CPU, every product is of packed weights: none is left to torch.
        pooler: None: nothing is pooled.
        generates: text is generated.
        max_seq_length: tokens that sentence-transformers' files allow, if they say so.
        draft: makes drafts for this one.
        draft_fingerprint: of its weights, and how they are kept.
        encoder: of images or sounds; None: prompts are text, because of `why_text`.
        collectives: of the ranks that run the model together.
    """

    model: Model
    ops: Operations
    numbers: Numbers
    architecture: str
    model_impl: str
    weights: str
    is_packed: bool
    draft: DraftConfig | None = None
    draft_fingerprint: str = ""
    encoder: MultiModalEncoder | None = None
    why_text: str = ""
    pooler: Pooler | None = None
    generates: bool = True
    max_seq_length: int | None = None
    collectives: Collectives = SINGLE_RANK
    mapped_bytes: int = 0
    has_host_experts: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.numbers.activations

    @property
    def traits(self) -> DeviceTraits:
        return traits_of(self.ops.device)

    @property
    def is_quantised(self) -> bool:
        """Whether most of the weights' bytes are quantised."""
        return "float" not in self.weights.split("+")[0]

    @property
    def captures_steps(self) -> bool:
        """Whether a GPU may replay its steps: transformers' code may wait for the device, and
        experts in the host's memory do."""
        return self.model_impl != "transformers" and not self.has_host_experts

    @property
    def computes_in_bytes(self) -> bool:
        """Whether products are of bytes on a CPU, and attention our own."""
        is_own = self.model_impl != "transformers"
        return self.is_quantised and self.traits.packs_weights and is_own

    def step_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Upper estimate of one step's activations, in bytes.

        Hidden states, projections and the feed-forward's intermediate live one layer at a time
        (about 32 hidden widths a token); logits are float32, with copies for sampling."""
        total = 0
        for model in [self.model] if self.draft is None else [self.model, self.draft.model]:
            spec = model.spec
            per_token = 32 * spec.query_width * self.dtype.itemsize
            total += max_num_tokens * per_token + max_num_seqs * spec.vocab_size * 4 * 4
        return total


def load_any_model(
    options: EngineOptions,
    files: ModelFiles,
    device: torch.device,
    collectives: Collectives = SINGLE_RANK,
) -> LoadedModel:
    """The model as the options ask for it, in the formats that the daemon would serve.
    Raises StartupError: the device cannot serve, or neither we nor transformers can run the model;
    the message says why.
    `collectives`: of this rank, which loads its part alone; every rank calls this."""
    started_s = time.monotonic()
    if isinstance(files, PooledFiles) and files.is_encoder:
        check_encoder(options)
    keeps = keeps_blocks(options.quantization, options.dtype)
    numbers = choose_numbers(
        options.dtype,
        device,
        files.config,
        quantization=options.quantization,
        has_blocks=keeps and bool(files.quantised_types) and not _is_folder(files),
        native_bfloat16=native_bfloat16(
            device, options.num_threads, logger.info, by_node=options.numa is not None
        ),
    )
    if options.model_impl == "transformers":
        numbers = numbers.by_torch(_THROUGH_TRANSFORMERS)
    ops = _operations(options, files, device, numbers)
    _report_what_is_not_as_asked(options, files, ops)
    model = _load_own(options, files, numbers, ops, collectives)
    used_impl = "transformers" if model is None else "native"
    if model is None:
        if numbers != (numbers := numbers.by_torch(_THROUGH_TRANSFORMERS)):
            ops = _operations(options, files, device, numbers)
        model = _load_through_transformers(options, files, numbers.activations, ops, collectives)
    pooled = files if isinstance(files, PooledFiles) else None
    architecture = architecture_of(files.config)
    packing = ops.weight_packing(numbers.activations) if used_impl == "native" else None
    loaded = LoadedModel(
        model=model,
        ops=ops,
        numbers=numbers,
        architecture=architecture,
        model_impl=used_impl,
        weights=_with_origin(numbers.name if packing is None else _formats_of(packing), files),
        is_packed=traits_of(ops.device).packs_weights and packing is not None,
        mapped_bytes=0 if packing is None else packing.num_mapped_bytes(),
        pooler=None if pooled is None else pooled.pooler(model),
        generates=pooled is None or pooled.generates,
        max_seq_length=None if pooled is None else pooled.max_seq_length,
        collectives=collectives,
        has_host_experts=bool(options.cpu_experts),
    )
    has_products_of_torch = loaded.traits.packs_weights and not loaded.is_packed
    if options.batch_invariant and (has_products_of_torch or used_impl == "transformers"):
        raise ConfigurationError(
            f"--batch-invariant on a {'CPU' if loaded.traits.is_host else 'GPU'}: {architecture} "
            f"in {numbers.name} "
            f"({used_impl} code) has products that torch computes, in an order that depends on the "
            "batch; leave the option out, or use --dtype float32 and a model with native code"
        )
    if options.cpu_experts and (host := ops.weight_packing(loaded.dtype, _FIRST_EXPERTS)):
        size, how = sum(host.bytes_by_format().values()) / 1024**3, _formats_of(host)
        where = f"experts of the first {options.cpu_experts} layers are in the host's memory"
        logger.info("%s: %.1f GiB (%s)", where, size, how)
    logger.info(
        "loaded %s in %.1f s; weights: %s%s",
        files.name,
        time.monotonic() - started_s,
        loaded.weights,
        f" ({numbers.reason})" if numbers.reason else "",
    )
    return loaded


def _load_own(
    options: EngineOptions,
    files: ModelFiles,
    numbers: Numbers,
    ops: Operations,
    collectives: Collectives,
) -> Model | None:
    """None: transformers' code is to run it."""
    check_layers(files.config, traits_of(ops.device))
    check_cpu_experts(options, files.config)
    if options.load_format == "dummy":
        return _load_dummy(options, files, numbers.activations, ops, collectives)
    if options.model_impl == "transformers":
        return None
    try:
        return _load_native(options, files, numbers.activations, ops, collectives)
    except UnsupportedArchitecture as error:
        if options.model_impl == "native" or not files.path.is_dir():
            raise StartupError(str(error)) from error
        logger.info("%s; using transformers' model code", error)
        return None


def _operations(
    options: EngineOptions, files: ModelFiles, device: torch.device, numbers: Numbers
) -> Operations:
    select = partial(
        select_operations,
        keeps_blocks=keeps_blocks(options.quantization, options.dtype),
        num_threads=options.num_threads,
        by_node=options.numa is not None,
        report=logger.info,
    )
    try:
        ops = select(
            device,
            batch_invariant=options.batch_invariant,
            float_weights=numbers.weights,
            fp8_cache=options.kv_cache_dtype == "fp8",
            quantised_types=files.quantised_types,
        )
        if options.cpu_experts:
            from kernels.triton.operations import TritonOperations

            assert isinstance(ops, TritonOperations), "check_device refuses others"
            host = select("cpu", float_weights=float_weights_on_host(options, numbers.activations))
            ops.leave_experts_to(host, options.cpu_experts)
    except UnsupportedDevice as error:
        raise ConfigurationError(str(error)) from error
    return ops


def _report_what_is_not_as_asked(
    options: EngineOptions, files: ModelFiles, ops: Operations
) -> None:
    if options.num_threads is not None and ops.num_threads < options.num_threads:
        logger.warning(
            "--num-threads is %d, %d are used: that is what this process may have",
            options.num_threads,
            ops.num_threads,
        )
    would_keep = keeps_blocks(options.quantization, "auto") and bool(files.quantised_types)
    if would_keep and options.dtype != "auto":
        logger.warning(
            "--dtype %s: the file's quantised weights (%s) are dequantised, which is slower and "
            "takes more memory; omit --dtype to run them as they are",
            options.dtype,
            ", ".join(sorted(files.quantised_types)),
        )


def _load_native(
    options: EngineOptions,
    files: ModelFiles,
    dtype: torch.dtype,
    ops: Operations,
    collectives: Collectives,
) -> Model:
    packing = ops.weight_packing(dtype)
    limit = DEFAULT_LIMIT_BYTES if options.weight_cache_size is None else options.weight_cache_size
    cache, kept_in = PackedWeightCache(cache_folder() / "weights", limit), None
    keeps = keeps_blocks(options.quantization, options.dtype)
    is_quantised = keeps or options.quantization in ("int8", "int4")
    # a GPU's layouts are made at once, on the device
    if traits_of(ops.device).packs_weights and packing is not None and is_quantised:
        packed_as: str = "blocks" if keeps else options.quantization
        mine = collectives.parallel
        if mine.world_size > 1:
            packed_as += f" {mine}"
        kept_in = cache.file_for(files.fingerprint, files.weight_files, packed_as)
        if keeps:
            least_bytes = sum(file.stat().st_size for file in files.weight_files)
        else:
            least_bytes = files.num_weights * (8 if options.quantization == "int8" else 5) // 8
        cache.open(packing, kept_in, least_bytes=least_bytes // mine.world_size)
    model = load_model(
        files.config,
        files.tensors(keeps_blocks=packing is not None),
        dtype=dtype,
        ops=ops,
        max_model_len=options.max_model_len,
        transfer=weight_transfer_to(ops.device),
        drops_zero_biases=bool(files.quantised_types),
        collectives=collectives,
        block_inputs=_block_inputs(files),
    )
    if packing is not None and kept_in is not None:
        cache.save(packing, kept_in, files.weight_files)
    return model


def _block_inputs(files: ModelFiles) -> frozenset[int]:
    """Where a matrix in the formats that may be computed with can be cut."""
    names = files.quantised_types
    blocks = [GgmlType[name].block_elements for name in names if name in GgmlType.__members__]
    if len(blocks) < len(names):
        blocks.append(_LARGE_GROUP_INPUTS)
    return frozenset({_GROUP_INPUTS, *blocks})


def _formats_of(packing: WeightPacking) -> str:
    by_format = packing.bytes_by_format()
    return "+".join(sorted(by_format, key=lambda name: -by_format[name]))


def _is_folder(files: ModelFiles) -> bool:
    """Whether these are a folder, or the config.json of one."""
    return files.path.is_dir() or not files.weight_files


def _with_origin(weights: str, files: ModelFiles) -> str:
    """Says what a folder's quantised weights were, where they are not kept as they are."""
    kept = {name.casefold() for name in weights.split("+")}
    lost = sorted(name for name in files.quantised_types if name.casefold() not in kept)
    if not lost or not _is_folder(files):
        return weights
    if kept >= {f"{name}{_WEIGHT_ONLY}" for name in lost}:
        logger.warning(
            "this GPU multiplies no float8 (that needs compute capability 8.9): the weights stay "
            "float8 and are widened as they are read, activations stay in 16 bits"
        )
        return weights
    how = "dequantised from" if kept <= _FLOAT_FORMATS else "from"
    return f"{weights} ({how} {' and '.join(lost)})"


def _load_dummy(
    options: EngineOptions,
    files: ModelFiles,
    dtype: torch.dtype,
    ops: Operations,
    collectives: Collectives,
) -> Model:
    if options.model_impl == "transformers":
        raise ConfigurationError(
            "--model-impl transformers has no effect with --load-format dummy, which makes our own "
            "models; omit one of them"
        )
    logger.warning("the weights of %s are random: its answers mean nothing", files.name)
    quantised = files.random_layers if isinstance(files, ConfigOnly) else None
    try:
        return load_dummy_model(
            files.config,
            dtype=dtype,
            ops=ops,
            max_model_len=options.max_model_len,
            collectives=collectives,
            block_inputs=_block_inputs(files),
            draw_quantised=None if quantised is None else quantised.draw,
        )
    except UnsupportedArchitecture as error:
        raise StartupError(str(error)) from error


def _load_through_transformers(
    options: EngineOptions,
    files: ModelFiles,
    dtype: torch.dtype,
    ops: Operations,
    collectives: Collectives,
) -> Model:
    if collectives.parallel.world_size > 1:
        raise ConfigurationError(
            f"{files.name} runs through transformers' model code, which serves one rank; leave "
            "out --tensor-parallel-size and --pipeline-parallel-size"
        )
    if options.quantization in ("int8", "int4"):
        raise ConfigurationError(
            f"--quantization {options.quantization} has no effect on transformers' model code, "
            f"which {files.name} needs or --model-impl asks for; leave it out"
        )
    if options.capture_at_start:
        raise ConfigurationError(
            f"--capture-at-start has no effect on {files.name}, whose model code is transformers': "
            "no CUDA graph is captured of it; leave it out"
        )
    if not files.path.is_dir():
        raise ConfigurationError(
            f"--model-impl transformers needs a model folder, {files.path} is a file"
        )
    if files.quantised_types:
        raise StartupError(
            f"{files.name} is quantised ({', '.join(files.quantised_types)}), and transformers' "
            "model code runs unquantised models only here; use those weights"
        )
    if files.config.get("is_encoder_decoder"):
        from engine_core.models.encoder_decoder.loading import load_encoder_decoder

        return load_encoder_decoder(
            files.path, files.config, dtype=dtype, max_model_len=options.max_model_len
        )
    from engine_core.models.transformers.model import load_transformers_model

    return load_transformers_model(files.path, files.config, dtype=dtype, ops=ops)
