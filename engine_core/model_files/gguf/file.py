"""A model as a GGUF file, or as the numbered parts of one, in Hugging Face terms."""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.model_files.download import recommended_sampling_of
from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.fingerprint import fingerprint_files
from engine_core.model_files.gguf.config import GgufMetadata, apply_frequency_factors, build_config
from engine_core.model_files.gguf.header import (
    SUPPORTED_TYPES,
    GgufHeader,
    GgufTensor,
    read_gguf_header,
)
from engine_core.model_files.gguf.tensor_names import (
    IGNORED,
    ROPE_FACTORS,
    Change,
    HfTensor,
    hf_tensor,
    of_drafts,
    undo,
)
from engine_core.model_files.gguf.tokenizer import build_tokenizer, end_token_ids
from engine_core.model_files.interface import EncoderFile, TokenizerFiles

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import QuantisedTensor, WeightPart

_RELEASE_BYTES, _LAYER_BYTES = 16 << 20, 1 << 30
"""What is given back at a time, and how far before it: parts that wait for others of their layer
are read a second time, when they are packed."""

_LAYER = re.compile(r"blk\.(\d+)\.")
_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile:
    """`ModelFiles` over a .gguf file.

    Args:
        file: the file, or any part of a `NAME-0000i-of-0000n.gguf` set, all in one folder.
        report: gets a line before work that takes seconds.

    Raises:
        BrokenModelFile: the file, or a part, is missing, truncated or garbage.
        UnsupportedModelFile: an architecture, tensor or quantisation that is not read.
    """

    given_tokenizer: TokenizerFiles | None = None
    mmproj: EncoderFile | None = None

    def __init__(self, file: Path, *, report: Callable[[str], None]) -> None:
        self._headers = tuple(read_gguf_header(part) for part in _parts(file))
        self.path = self._headers[0].file
        match = _PART.fullmatch(self.path.name)
        self.name = match["stem"] if match else self.path.stem
        self._report = report
        tensors = _merge(self._headers)
        self._meta = GgufMetadata(
            str(self.path), self._headers[0].metadata, tensors, self._numbers_of
        )
        self._text = build_config(self._meta)
        self.config = self._text
        self.generation_config: dict[str, Any] = {**recommended_sampling_of(self.path)}
        self.weight_files = tuple(header.file for header in self._headers)
        self.quantised_types = frozenset(
            tensor.quant_type.name for tensor in tensors.values() if _is_quantised(tensor, 2, 3)
        )
        self._check_tensors(tensors)
        if ROPE_FACTORS in tensors and ROPE_FACTORS not in self._meta.gguf.read_tensors:
            self._apply_rope_factors(tensors[ROPE_FACTORS])

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return end_token_ids(self._meta.raw)

    @property
    def architecture(self) -> str:
        """The file's `general.architecture`."""
        return self._meta.architecture

    @property
    def metadata(self) -> dict[str, Any]:
        """All keys of the file."""
        return self._meta.raw

    @property
    def num_weights(self) -> int:
        return sum(math.prod(tensor.shape) for each in self._headers for tensor in each.tensors)

    @cached_property
    def fingerprint(self) -> str:
        more = () if self.mmproj is None else (self.mmproj.file,)
        return fingerprint_files((*self.weight_files, *more))

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        # torch: not for opening
        from engine_core.model_files.gguf.dequantize import dequantize, unstack

        for header in self._headers:
            for tensor, data in mapped(header):
                target = self._target(tensor.name)
                if target is None:
                    continue  # checked at opening: only what the config has taken in
                if target.is_stack and keeps_blocks and _is_quantised(tensor, 3):
                    num_experts, *shape = tensor.shape
                    for expert, part in enumerate(data.view(num_experts, -1)):
                        one = dataclasses.replace(tensor, shape=tuple(shape))
                        yield target.name.format(expert), self._blocks(one, part, "none")
                    continue
                if target.is_stack:
                    yield from unstack(target.name, tensor, data)
                    continue
                is_kept = keeps_blocks and _is_quantised(tensor, 2, 3)
                if is_kept or tensor.name in self._meta.gguf.in_place:
                    blocks = self._blocks(tensor, data, target.change)
                    yield target.name, self._reordered(target.name, blocks)
                    continue
                values = dequantize(data, tensor.quant_type, tensor.shape)
                values = undo(target.change, values, self._text)
                yield target.name, self._reordered(target.name, values)
        yield from self._absent_biases()

    def _reordered(self, name: str, part: WeightPart) -> WeightPart:
        reordered = self._meta.gguf.reordered
        return part if reordered is None else reordered(name, part, self._text)

    def _target(self, name: str) -> HfTensor | None:
        """Its name on the other side; None: it is not read."""
        target = hf_tensor(self._meta.gguf, name)
        if target is None or not self._is_of_drafts(name):
            return target
        return of_drafts(self._meta.gguf, target, self._text["num_hidden_layers"])

    def _is_of_drafts(self, name: str) -> bool:
        """Whether a tensor is of the layers behind the model's own, which only draft."""
        match = _LAYER.match(name)
        return match is not None and int(match[1]) >= self._text["num_hidden_layers"]

    def tokenizer(self) -> TokenizerFiles | None:
        return self.given_tokenizer or build_tokenizer(self._meta, report=self._report)

    def _blocks(self, tensor: GgufTensor, data: torch.Tensor, change: Change) -> QuantisedTensor:
        """The matrix; matrices of three dimensions below each other."""
        import torch

        from engine_core.model_files.gguf.dequantize import dequantize
        from kernels.interface.weights import QuantisedTensor

        num_rows, num_inputs = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        kind = tensor.quant_type

        def decode(arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
            blocks = arrays["blocks"]
            shape = (len(blocks), blocks.shape[1] // kind.block_bytes * kind.block_elements)
            return dequantize(blocks.reshape(-1), kind, shape)

        # a whole row moves, and no block crosses the end of one
        order = None if change == "none" else undo(change, torch.arange(num_rows), self._text)
        return QuantisedTensor(
            type_name=kind.name,
            shape=(num_rows, num_inputs),
            arrays={"blocks": data.view(num_rows, -1)},
            decode=decode,
            row_order_N=order,
            block_inputs=kind.block_elements,
        )

    def _check_tensors(self, tensors: dict[str, GgufTensor]) -> None:
        for tensor in tensors.values():
            if tensor.quant_type not in SUPPORTED_TYPES:
                supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
                raise UnsupportedModelFile(
                    f"{self.path}: tensor {tensor.name!r} is of type {tensor.quant_type.name}, "
                    f"which is not read; use a file with {supported}"
                )
            known = tensor.name in (ROPE_FACTORS, *self._meta.gguf.read_tensors)
            known = known or bool(IGNORED.fullmatch(tensor.name))
            known = known or self._is_of_drafts(tensor.name)
            if not known and hf_tensor(self._meta.gguf, tensor.name) is None:
                self._meta.refuse(f"tensor {tensor.name!r}")

    def _numbers_of(self, tensor: GgufTensor) -> list[float]:
        from engine_core.model_files.gguf.dequantize import dequantize

        header = next(header for header in self._headers if tensor in header.tensors)
        data = next(data for found, data in mapped(header) if found == tensor)
        numbers: list[float] = dequantize(data, tensor.quant_type, tensor.shape).tolist()
        return numbers

    def _apply_rope_factors(self, tensor: GgufTensor) -> None:
        try:
            self._text["rope_parameters"] = apply_frequency_factors(
                self._text["rope_parameters"], self._numbers_of(tensor), self._text["head_dim"]
            )
        except (ValueError, ArithmeticError) as error:
            self._meta.refuse(str(error))

    def _absent_biases(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Zeros: transformers' attention_bias is also on o_proj, where llama.cpp writes none."""
        import torch

        if not (self._text.get("attention_bias") and self._meta.gguf.biases_output):
            return
        names = {tensor.name for header in self._headers for tensor in header.tensors}
        for layer in range(self._text["num_hidden_layers"]):
            if f"blk.{layer}.attn_output.bias" not in names:
                name = f"model.layers.{layer}.self_attn.o_proj.bias"
                yield name, torch.zeros(self._text["hidden_size"])


def _parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    parts = [
        file.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise BrokenModelFile(
            f"{file.parent} lacks {len(missing)} of the {count} parts of the model: "
            f"{', '.join(missing[:5])}; download them into the same folder"
        )
    return parts


def _merge(headers: tuple[GgufHeader, ...]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise BrokenModelFile(
                    f"{header.file}: tensor {tensor.name!r} is in an earlier part as well; the "
                    f"parts are of different models: download them again"
                )
            tensors[tensor.name] = tensor
    return tensors


def _is_quantised(tensor: GgufTensor, *dimensions: int) -> bool:
    return len(tensor.shape) in dimensions and tensor.quant_type.block_elements > 1


def mapped(header: GgufHeader) -> Iterator[tuple[GgufTensor, torch.Tensor]]:
    """Each tensor with its bytes, uint8, mapped privately from the file.

    What has been read is given back to the system now and then, so that at no time all of the file
    counts as this process's memory; who reads it again reads the file again."""
    import torch

    if not header.tensors:
        return
    try:
        # copy-on-write, not read-only: torch warns of memory that it may not write
        with header.file.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise BrokenModelFile(f"{header.file} cannot be read: {error}; check it") from error
    last = max(header.tensors, key=lambda tensor: tensor.start_bytes + tensor.num_bytes)
    if last.start_bytes + last.num_bytes > mapped.numel():
        raise BrokenModelFile(f"{header.file} became shorter since it was opened; restore it")
    released_bytes = 0
    for tensor in header.tensors:
        yield tensor, mapped[tensor.start_bytes : tensor.start_bytes + tensor.num_bytes]
        passed_bytes = tensor.start_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if passed_bytes - released_bytes >= _RELEASE_BYTES:
            start = max(0, released_bytes - _LAYER_BYTES)
            pages.madvise(mmap.MADV_DONTNEED, start, passed_bytes - start)
            released_bytes = passed_bytes
