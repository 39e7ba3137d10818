"""Our table of GGUF types against the gguf package's."""

import gguf
import pytest

from engine_core.model_files.gguf import dequantize
from engine_core.model_files.gguf.header import BLOCKS, BY_TORCH, PLAIN, SUPPORTED_TYPES, GgmlType


@pytest.mark.parametrize("kind", GgmlType, ids=lambda kind: kind.name)
def test_number_and_block_are_those_of_the_gguf_package(kind):
    theirs = gguf.GGMLQuantizationType[kind.name]
    assert theirs.value == kind.value
    assert hash(theirs) == hash(kind)  # so that either finds the other's entries
    assert gguf.GGML_QUANT_SIZES[theirs] == BLOCKS[kind]


def test_what_the_gguf_package_can_dequantise_is_read():
    known = set(GgmlType) & set(gguf.quants._type_traits)
    assert len(known) > 20
    assert known - {GgmlType.NVFP4} <= SUPPORTED_TYPES


def test_what_is_said_to_be_dequantised_here_is():
    assert set(dequantize._BY_TORCH) == BY_TORCH
    assert set(dequantize._PLAIN) == PLAIN
