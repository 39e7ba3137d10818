"""An adapter's weights, from a PEFT folder or a GGUF file, checked against the model's products."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engine_core.adapters.errors import AdapterError
from engine_core.adapters.gguf_file import read_gguf_adapter
from engine_core.adapters.peft_folder import CONFIG, WEIGHTS, read_peft_adapter
from engine_core.layers.config import WeightFactors
from engine_core.model_files import ModelFilesError
from engine_core.models.decoder import Decoder
from engine_core.models.interface import ModelSpec, ProductsOf
from engine_core.models.weight_factors import factors_of
from kernels.interface.lora import LoRAPart

_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A projection that an adapter may change: `part` of the model's product `linear`."""

    linear: int
    part: int
    num_inputs: int
    num_outputs: int
    input_order_E: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterTargets:
    """What adapters of one model may change. `by_name`: checkpoint prefixes, such as
    "model.layers.0.self_attn.q_proj"."""

    by_name: Mapping[str, AdapterTarget]
    spec: ModelSpec
    has_experts: bool
    products_of: ProductsOf
    factors: Sequence[WeightFactors] | None = ()

    @classmethod
    def of_model(cls, model: Decoder) -> "AdapterTargets":
        by_name = {
            name: AdapterTarget(index, part, linear.num_inputs, size, linear.input_order_E)
            for index, linear in enumerate(model.linears)
            for part, (name, size) in enumerate(linear.parts)
        }
        return cls(
            by_name,
            model.spec,
            model.has_experts,
            model.products_of,
            model.config.factors,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`fingerprint`: of all that its results depend on. `parts`: by product and part of it."""

    fingerprint: str
    rank: int
    parts: Mapping[int, Mapping[int, LoRAPart]]


def read_adapter(path: Path, targets: AdapterTargets, *, max_rank: int | None) -> Adapter:
    """`path`: a folder as PEFT saves it, or a .gguf file. `max_rank` None: any.
    Raises AdapterError: it is not there, broken, of a kind that is not applied, or of another
    model."""
    try:
        if path.is_dir():
            files = [path / CONFIG, path / WEIGHTS]
            found = _with_factors(path, read_peft_adapter(path), targets.factors)
        elif path.is_file():
            files = [path]
            found = read_gguf_adapter(path, targets.spec, has_experts=targets.has_experts)
        else:
            raise AdapterError(
                f"there is no adapter at {path}; name a folder with {CONFIG} and {WEIGHTS}, or a "
                ".gguf file"
            )
        fingerprint = _hash_files(files)
    except ModelFilesError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}; check it") from error
    parts: dict[int, dict[int, LoRAPart]] = {}
    for name, part in _by_product(found, targets.products_of):
        target = targets.by_name.get(name)
        if target is None:
            raise AdapterError(_unknown(path, name, targets))
        _check_part(path, name, part, target, max_rank)
        if target.input_order_E is not None:
            part = LoRAPart(part.a_RE[:, target.input_order_E], part.b_NR)
        parts.setdefault(target.linear, {})[target.part] = part
    rank = max(part.rank for part in found.values())
    return Adapter(fingerprint, rank, parts)


def _with_factors(
    path: Path, found: Mapping[str, LoRAPart], factors: Sequence[WeightFactors] | None
) -> Mapping[str, LoRAPart]:
    """As its weights have them; llama.cpp's files of adapters have them, too."""
    if factors is None:
        raise AdapterError(
            f"{path} was trained beside factors that the model's GGUF file does not name; use the "
            "adapter's GGUF file, or the model's Hugging Face folder"
        )
    with_factors = {}
    for name, part in found.items():
        factor = factors_of(name, factors, with_inputs=True)
        b_NR = part.b_NR
        if isinstance(factor, float):
            b_NR = b_NR * factor
        elif factor is not None and b_NR.dim() == 2 and len(b_NR) == len(factor):
            b_NR = b_NR * factor[:, None]
        with_factors[name] = LoRAPart(part.a_RE, b_NR)
    return with_factors


def _by_product(
    found: Mapping[str, LoRAPart], products_of: ProductsOf
) -> Iterator[tuple[str, LoRAPart]]:
    """By the model's names of products: rows of B go the way of a checkpoint's weight."""
    for name, part in found.items():
        for product, b_NR in products_of(f"{name}.weight", part.b_NR):
            assert isinstance(b_NR, torch.Tensor), "B is quantised"
            yield product.removesuffix(".weight"), LoRAPart(part.a_RE, b_NR)


def _unknown(path: Path, name: str, targets: AdapterTargets) -> str:
    if targets.has_experts and ".experts" in name:
        why = "experts take no adapters in this engine; train it on other layers"
    elif name.endswith(("embed_tokens", "lm_head")):
        why = "embeddings and the output layer take no adapters; train it on other layers"
    elif name.endswith((".k_b_proj", ".v_b_proj")):
        why = "kv_b_proj of latent attention takes no adapters; train it on other layers"
    else:
        why = "the model has no such layer; use an adapter that was made for this model"
    return f"{path} changes {name}: {why}"


def _check_part(
    path: Path, name: str, part: LoRAPart, target: AdapterTarget, max_rank: int | None
) -> None:
    a, b = tuple(part.a_RE.shape), tuple(part.b_NR.shape)
    needed = (target.num_outputs, target.num_inputs)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != needed:
        raise AdapterError(
            f"{path}: A is {list(a)} and B is {list(b)} for {name}, which has {needed[1]} inputs "
            f"and {needed[0]} outputs; use an adapter that was made for this model"
        )
    if max_rank is not None and part.rank > max_rank:
        raise AdapterError(
            f"{path} has rank {part.rank} for {name}, the limit is {max_rank}; start the engine "
            "with a larger --max-lora-rank"
        )
    if not bool(torch.isfinite(part.a_RE).all() and torch.isfinite(part.b_NR).all()):
        raise AdapterError(f"{path}: weights for {name} are not finite; train or copy it again")


def _hash_files(files: Sequence[Path]) -> str:
    """Of all bytes: adapters are small, and one that was trained on differs in few places."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.stat().st_size};".encode())
        with file.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()
