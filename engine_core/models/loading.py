"""Config and tensors to a model that runs: tensors come as (name, tensor) in any order, one at a
time, or are drawn at random, to measure speed where no weights are at hand."""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.layers import MAX_POSITIONS
from engine_core.layers.config import InterleavedRows, WeightFactors
from engine_core.layers.parameters import CopyWeight, Placements, place
from engine_core.models.blocks.block import BlockBuilder
from engine_core.models.decoder import Decoder
from engine_core.models.encoders.bidirectional import BidirectionalDecoder
from engine_core.models.encoders.encoder import Encoder
from engine_core.models.encoders.encoder_configs import EncoderConfig
from engine_core.models.encoders.task_adapters import with_task
from engine_core.models.errors import ModelWeightsError, UnsupportedArchitecture
from engine_core.models.expert_tensors import outputs_first
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.heads.eagle import EagleHead
from engine_core.models.heads.eagle_config import read_eagle_config
from engine_core.models.heads.head import DraftHead
from engine_core.models.heads.mtp import MTPHead, mtp_tensors
from engine_core.models.interface import Model
from engine_core.models.interleaved_rows import taken_apart
from engine_core.models.parallel.sharding import Sharding
from engine_core.models.parallel.stages import Stage, split_layers
from engine_core.models.registry import find_family, read_model_config
from engine_core.models.tensor_names import as_products, as_published, renamed
from engine_core.models.text_part import text_part, text_tensor
from engine_core.models.weight_factors import multiplied
from engine_core.models.weight_transfer import WeightTransfer
from kernels.interface.operations import Operations
from kernels.interface.sampling import SamplingOperations
from kernels.interface.weights import WeightPart

_RECOMPUTED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
    *(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
)
"""Tensors that old checkpoints carry and that follow from the config."""
_MOST_NAMES = 5
DrawQuantised = Callable[[str, tuple[int, ...], torch.device], WeightPart | None]
"""A checkpoint's tensor of that name and shape, made on a device."""


def load_model(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, WeightPart]],
    *,
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None = None,
    transfer: WeightTransfer | None = None,
    drops_zero_biases: bool = False,
    collectives: Collectives = SINGLE_RANK,
    block_inputs: Collection[int] = (1,),
) -> Model:
    """Build the model of a config.json on the device of `ops`, and fill it.

    Args:
        config: as in config.json, old or new spelling.
        tensors: with the names of Hugging Face checkpoints, each read once and dropped, so that
            beside the model no more than one layer is in memory.
        dtype: of weights and activations.
        max_model_len: positions to prepare for, if fewer than the model was made for.
        drops_zero_biases: biases of zeros may come that no layer takes: some quantisers write one
            for every layer.
        transfer: how tensors get to that device; default: by plain copies. Finished here.
        collectives: of the ranks that share the model: this one takes its part of every tensor.
        block_inputs: see `Sharding`.

    Raises:
        UnsupportedArchitecture: no exact code here. Raised before the first tensor is read.
        ModelConfigError: the config has impossible values.
        ModelWeightsError: the tensors do not match the config.
    """
    name, family, model, sharding = _build(
        config, dtype, ops, max_model_len, collectives, block_inputs
    )
    pending = model.placements()
    transfer = transfer or WeightTransfer()
    if text_part(config) is not None:
        tensors = _of_text(tensors, model.spec.hidden_size)
    if isinstance(model, Encoder) and (adapters := model.config.task_adapters) is not None:
        tensors = with_task(tensors, adapters)
    _place(
        pending,
        tensors,
        family,
        name,
        transfer.copy,
        drops_zero_biases=drops_zero_biases,
        stage=model.stage,
        sharding=sharding,
        interleaved=model.config.interleaved,
        factors=(model.config.factors or ()) if isinstance(model, Decoder) else (),
    )
    _check_complete(pending.keys() - model.optional_names, name)
    try:
        model.finish_loading()
    except ValueError as error:
        raise ModelWeightsError(f"the vocabulary of {name}: {error}") from error
    transfer.finish()
    return model


_EAGLE = Family(
    names=(),
    model_type="eagle3",
    read=llama.read,
    tensor_prefixes=(
        ("model.midlayer.", "model.layers.0."),
        ("midlayer.", "model.layers.0."),
        ("model.", "model."),
        ("lm_head.", "lm_head."),
        ("", "model."),
    ),
    ignored_prefixes=("t2d", "model.t2d"),
)


def load_eagle_head(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, WeightPart]],
    target: Decoder,
    *,
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None = None,
) -> EagleHead:
    """The EAGLE-3 head of a config.json for `target`; other arguments and errors as of
    `load_model`."""
    resolved = read_eagle_config(config, target.config)
    parts = dict(tensors)  # few: one layer's
    names = frozenset(renamed(name, _EAGLE) for name in parts)
    width, combine = resolved.layer.spec.hidden_size, parts.get("fc.weight")
    is_first = combine is not None and tuple(combine.shape) == (width, 2 * width)
    if is_first and len(resolved.state_layers) != 2:
        raise UnsupportedArchitecture("heads of EAGLE-1 are not supported, only of EAGLE-3")
    num_positions = min(max_model_len or target.spec.max_model_len, MAX_POSITIONS)
    head = EagleHead(
        resolved, target, names=names, dtype=dtype, ops=ops, num_positions=num_positions
    )
    _fill_head(head, parts.items(), _EAGLE)
    try:
        head.finish_loading()
    except ValueError as error:
        raise ModelWeightsError(str(error)) from error
    return head


def load_mtp_head(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, WeightPart]],
    target: Decoder,
    *,
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None = None,
) -> MTPHead:
    """The head for multi-token prediction of the checkpoint that `target` is of: `config` and
    `tensors` are the target's, of which it takes its own. Other arguments and errors as of
    `load_model`."""
    _, family = find_family(config)
    own = mtp_tensors(tensors, target.spec.num_layers)
    num_positions = min(max_model_len or target.spec.max_model_len, MAX_POSITIONS)
    head = MTPHead(target, dtype=dtype, ops=ops, num_positions=num_positions)
    family = replace(family, tensor_prefixes=(), ignored_prefixes=())
    _fill_head(head, own.items(), family, interleaved=target.config.interleaved)
    return head


def _fill_head(
    head: DraftHead,
    tensors: Iterable[tuple[str, WeightPart]],
    family: Family,
    *,
    interleaved: Sequence[InterleavedRows] = (),
) -> None:
    pending, copy = head.placements(), WeightTransfer().copy
    _place(
        pending,
        tensors,
        family,
        "the head",
        copy,
        drops_zero_biases=False,
        interleaved=interleaved,
    )
    _check_complete(pending, "the head")


def load_dummy_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None = None,
    collectives: Collectives = SINGLE_RANK,
    block_inputs: Collection[int] = (1,),
    draw_quantised: DrawQuantised | None = None,
) -> Model:
    """Build the model of a config.json with random weights, made on the device of `ops`.

    Other arguments and errors as of `load_model`. Ranks draw whole tensors, so that their parts are
    those of one model.

    Args:
        draw_quantised: a layer's weight, where `ops` packs it in few bits; of None it is floating.
    """
    _, _, model, sharding = _build(config, dtype, ops, max_model_len, collectives, block_inputs)
    for name, placement in model.placements().items():
        if name not in model.optional_names:
            shape = placement.shape if sharding is None else sharding.whole(name, placement.shape)
            part: WeightPart | None = None
            if draw_quantised is not None and placement.may_be_quantised:
                part = draw_quantised(name, shape, ops.device)
            if part is None:
                part = draw_weight(name, shape, dtype=dtype, device=ops.device)
            if sharding is not None:
                part = sharding.take(name, part)
            place(placement, part, WeightTransfer().copy)
    model.finish_loading()
    return model


def make_sharding(
    config: Mapping[str, Any],
    ops: Operations,
    collectives: Collectives,
    block_inputs: Collection[int],
) -> Sharding | None:
    """A rank's part of the model of a config.json; None: it has all of it.
    Raises UnsupportedArchitecture: a model that cannot be shared. ModelConfigError: not by so many
    ranks."""
    if collectives.parallel.tp_size == 1:
        return None
    whole = read_model_config(config)
    if isinstance(whole, EncoderConfig) or whole.bidirectional:
        raise UnsupportedArchitecture(
            "encoder-only models run on one rank; leave out --tensor-parallel-size"
        )
    return Sharding(
        whole,
        collectives.parallel,
        block_inputs=block_inputs,
        # a device that samples on its own also has all experts of a layer in its kernels
        by_expert=isinstance(ops, SamplingOperations),
    )


def _build(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None,
    collectives: Collectives,
    block_inputs: Collection[int],
) -> tuple[str, Family, Decoder | Encoder, Sharding | None]:
    """The family, an empty model of it, and how tensors are cut for it."""
    sharding = make_sharding(config, ops, collectives, block_inputs)
    name, family = find_family(config)
    resolved = read_model_config(config)
    num_positions = min(max_model_len or resolved.spec.max_model_len, MAX_POSITIONS)
    if isinstance(resolved, EncoderConfig):
        num_positions = min(num_positions, resolved.spec.max_model_len)
        encoder = Encoder(resolved, dtype=dtype, ops=ops, num_positions=num_positions)
        return name, family, encoder, sharding
    family = replace(family, ignored_prefixes=family.ignored_prefixes + resolved.unused)
    place = collectives.parallel
    build = BlockBuilder(
        resolved if sharding is None else sharding.config,
        dtype=dtype,
        ops=ops,
        num_positions=num_positions,
        collectives=collectives,
        stage=split_layers(resolved, place.pp_size)[place.pp_rank],
    )
    products_of = partial(as_products, family, resolved.interleaved)
    made = BidirectionalDecoder if resolved.bidirectional else Decoder
    return name, family, made(build, products_of), sharding


def _place(
    pending: Placements,
    tensors: Iterable[tuple[str, WeightPart]],
    family: Family,
    name: str,
    copy: CopyWeight,
    *,
    drops_zero_biases: bool,
    stage: Stage | None = None,
    sharding: Sharding | None = None,
    interleaved: Sequence[InterleavedRows] = (),
    factors: Sequence[WeightFactors] = (),
) -> None:
    """Hand every tensor to its place; what is left in `pending` did not come."""
    placed: set[str] = set()
    unexpected: list[str] = []
    tensors = taken_apart(as_published(tensors, family), interleaved)
    for file_name, tensor in multiplied(tensors, factors):
        if file_name.startswith(family.ignored_prefixes or ("\0",)):
            continue
        target = renamed(file_name, family)
        placement = pending.pop(target, None)
        if placement is None:
            if target in placed:
                raise ModelWeightsError(f"tensor {file_name} comes twice; the files overlap")
            is_elsewhere = any(each and not each.takes(target) for each in (stage, sharding))
            if target.endswith(_RECOMPUTED_SUFFIXES) or is_elsewhere:
                continue
            if not (drops_zero_biases and _adds_nothing(target, tensor)):
                unexpected.append(file_name)
            continue
        if sharding is not None:
            tensor = sharding.take(target, tensor)
        if tuple(tensor.shape) != placement.shape:
            raise ModelWeightsError(
                f"tensor {file_name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(placement.shape)}; the two belong to different models"
            )
        try:
            place(placement, tensor, copy)
        except ValueError as error:  # a layer is packed when the last of its tensors has come
            raise ModelWeightsError(f"the layer of tensor {file_name}: {error}") from error
        placed.add(target)
    if unexpected:
        raise ModelWeightsError(
            f"{len(unexpected)} tensors have no place in {name}: {_listed(unexpected)}; "
            "config.json belongs to another model, or leaves out an option"
        )


def _check_complete(missing: Collection[str], name: str) -> None:
    if missing:
        raise ModelWeightsError(
            f"{len(missing)} tensors of {name} are missing: {_listed(missing)}; "
            "the model files are incomplete, or config.json belongs to another model"
        )


def _adds_nothing(name: str, tensor: WeightPart) -> bool:
    """Whether a tensor is a bias of zeros."""
    return name.endswith(".bias") and isinstance(tensor, torch.Tensor) and not bool(tensor.any())


def _of_text(
    tensors: Iterable[tuple[str, WeightPart]], hidden_size: int
) -> Iterable[tuple[str, WeightPart]]:
    """The tensors of a checkpoint's text model, under the names that it has by itself."""
    for file_name, tensor in tensors:
        if (name := text_tensor(file_name)) is not None:
            yield name, outputs_first(name, tensor, hidden_size)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------------- random weights


_STANDARD_DEVIATION = 0.02
"""As models are initialised: activations stay far from any dtype's limits in every layer."""


def draw_weight(
    name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A random tensor for a checkpoint name, made on `device`: ones for a norm or a factor, else
    normal around zero. Equal names give equal weights on a kind of device."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if len(shape) == 1 and ("norm" in name or "scal" in name):
        return tensor.fill_(1.0)
    # 32 bits, because a CPU's generator reads no more
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"0 {name}".encode()))
    return tensor.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
