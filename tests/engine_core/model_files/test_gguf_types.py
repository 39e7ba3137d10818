"""Our table of GGUF types against the gguf package's."""

import gguf
import pytest

from engine_core.model_files.gguf import dequantize
from engine_core.model_files.gguf.header import SUPPORTED_TYPES, GgmlType


@pytest.mark.parametrize("kind", GgmlType, ids=lambda kind: kind.name)
def test_number_and_block_are_those_of_the_gguf_package(kind):
    theirs = gguf.GGMLQuantizationType[kind.name]
    assert theirs.value == kind.value
    assert hash(theirs) == hash(kind)  # so that either finds the other's entries
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_elements, kind.block_bytes)


def test_what_can_be_dequantised_is_read():
    by_gguf = set(GgmlType) & set(gguf.quants._type_traits)
    assert len(by_gguf) > 20
    readable = by_gguf | set(dequantize.BY_TORCH) | set(dequantize.PLAIN)
    assert readable - {GgmlType.NVFP4} == SUPPORTED_TYPES
