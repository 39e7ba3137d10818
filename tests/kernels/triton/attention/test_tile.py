"""The instructions that widen float8, executed as PTX's manual says, against torch's conversion."""

import re

import pytest
import torch

from kernels.triton.attention.tile import TO_BF16, TO_FP16

CODES = torch.arange(256, dtype=torch.uint8)


def executed(ptx, word, dtype):
    """The four numbers that these instructions make of four codes in a register."""
    registers = {"$2": word}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def halves(word):
        bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
        return bits.to(torch.uint16).view(dtype)

    for line in ptx.strip("{} ").split(";"):
        name, *operands = re.split(r",?\s+", line.strip())
        if name in ("", ".reg"):
            continue
        out, *inputs = operands
        a, b, c = ([value(each) for each in inputs] + [0, 0])[:3]
        match name.split(".")[0], name:
            case "mov", _:
                registers[out] = a
            case "shr", "shr.u32":
                registers[out] = a >> b
            case "and", _:
                registers[out] = a & b
            case "lop3", _:
                assert inputs[3] == "0xEA"
                registers[out] = (a & b) | c
            case "prmt", _:
                both = (b << 32) | a
                picked = [(both >> 8 * ((c >> 4 * at) & 7)) & 255 for at in range(4)]
                registers[out] = int.from_bytes(picked, "little")
            case "fma", _:  # of powers of two: exact in float64, too
                x, y, z = (halves(each).double() for each in (a, b, c))
                low, high = (x * y + z).to(dtype).view(torch.uint16).tolist()
                registers[out] = low | (high << 16)
            case _:
                raise AssertionError(line)
    return torch.cat([halves(registers[name]) for name in ("$0", "$1")])


@pytest.mark.parametrize(("ptx", "dtype"), [(TO_BF16, torch.bfloat16), (TO_FP16, torch.float16)])
def test_every_float8_code_is_widened_exactly_by_its_bits(ptx, dtype):
    words = CODES.view(torch.int32).tolist()
    found = torch.cat([executed(ptx.value, word & 0xFFFFFFFF, dtype) for word in words])
    expected = CODES.view(torch.float8_e4m3fn).to(dtype)
    is_nan = expected.isnan()
    assert is_nan.nonzero().flatten().tolist() == [127, 255]
    assert found[is_nan].tolist() == [480, -480]
    assert torch.equal(found[~is_nan].view(torch.uint16), expected[~is_nan].view(torch.uint16))
