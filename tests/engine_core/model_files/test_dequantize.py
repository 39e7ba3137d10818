"""Dequantised blocks are, bit for bit, those of the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference

from engine_core.model_files import UnsupportedModelFile, open_model_files
from engine_core.model_files.gguf.dequantize import PIECE_ELEMENTS, dequantize
from engine_core.model_files.gguf.header import SUPPORTED_TYPES, GgmlType

PLAIN = {GgmlType.F32, GgmlType.F16, GgmlType.BF16, GgmlType.F64}
_QUANTISED = sorted(SUPPORTED_TYPES - PLAIN)


def random_blocks(quant_type: GgmlType, num_blocks: int) -> np.ndarray:
    """uint8 [N, block bytes]: every bit pattern, but for float16 fields that are not finite."""
    generator = np.random.default_rng(int(quant_type))
    shape = (num_blocks, quant_type.block_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(reference(blocks, quant_type)).all(axis=-1)
    return blocks[finite]


@pytest.mark.parametrize("quant_type", _QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_blocks", [1, 63, 300])
def test_blocks_equal_the_gguf_package(quant_type, num_blocks) -> None:
    blocks = random_blocks(quant_type, num_blocks + 30)[:num_blocks]
    shape = (len(blocks), quant_type.block_elements)
    values = dequantize(torch.from_numpy(blocks).flatten(), quant_type, shape)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), reference(blocks, quant_type))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_tensor_of_several_pieces_equals_the_gguf_package(extra: int) -> None:
    blocks = random_blocks(GgmlType.Q8_0, PIECE_ELEMENTS // 32 * 2)
    blocks = np.resize(blocks, (PIECE_ELEMENTS // 32 + extra, blocks.shape[1]))
    values = dequantize(torch.from_numpy(blocks).flatten(), GgmlType.Q8_0, (len(blocks), 32))
    expected = reference(blocks, GgmlType.Q8_0)
    np.testing.assert_array_equal(values.numpy(), expected)


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_files_give_the_tensor_back(write_gguf, tiny_llama_keys, quant_type) -> None:
    kind = GGMLQuantizationType[quant_type]
    weight = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    packed = gguf.quants.quantize(weight, kind)
    path = write_gguf(tiny_llama_keys, {"token_embd.weight": (packed, kind)})
    tensors = dict(open_model_files(str(path), report=print).tensors())
    expected = reference(packed, kind)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"].float().numpy(), expected)


def test_an_unread_type_is_refused_with_type_and_tensor(write_gguf, tiny_llama_keys) -> None:
    weight = np.zeros((8, 32), np.int8)
    path = write_gguf(tiny_llama_keys, {"token_embd.weight": weight})
    with pytest.raises(UnsupportedModelFile, match=r"'token_embd\.weight' is of type I8"):
        open_model_files(str(path), report=print)
