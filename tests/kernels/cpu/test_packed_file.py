"""Packed weights go to a file and come back with the same bits; any other file is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear
from kernels.cpu.packing import PackedFileError, map_packed, save_packed
from kernels.cpu.weights import pack_float, quantise_int4, quantise_int8

KEY = "a model, float32"


def test_weights_come_back_with_the_same_bits(library: NativeLibrary, tmp_path: Path) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(70, 75), torch.randn(70)
    weights = {
        "float32": pack_float(library, w, bias),
        "int8": quantise_int8(library, w),
        "int4": quantise_int4(library, w, bias),
    }
    path = tmp_path / "folder" / "packed"
    save_packed(path, weights, key=KEY)
    mapped = map_packed(library, path, key=KEY)
    x = torch.randn(5, 75)
    assert list(mapped) == list(weights)
    for name, weight in weights.items():
        assert mapped[name].num_outputs == weight.num_outputs
        assert torch.equal(linear(x, mapped[name]), linear(x, weight))
    path.unlink()  # what is mapped stays
    assert torch.equal(linear(x, mapped["int8"]), linear(x, weights["int8"]))
    assert not list(path.parent.iterdir())


@pytest.fixture
def saved(library: NativeLibrary, tmp_path: Path) -> Path:
    save_packed(tmp_path / "packed", {"w": quantise_int8(library, torch.randn(40, 64))}, key=KEY)
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((lambda whole, size=size: whole[:size], "bytes") for size in (0, 10, 64, 100, 300, -1)),
        (lambda whole: whole + b"more", "should have"),
        (lambda whole: b"GGUF" + whole[4:], "no file of packed weights"),
        (lambda whole: whole.replace(b'"outputs": 40', b'"outputs": 99'), "damaged header"),
        (lambda whole: whole.replace(b'"inputs": 64', b'"inputs": 99'), "damaged header"),
    ],
)
def test_a_damaged_file_is_refused(
    library: NativeLibrary, saved: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    right = saved.read_bytes()
    saved.write_bytes(damage(right))
    assert saved.read_bytes() != right
    with pytest.raises(PackedFileError, match=words):
        map_packed(library, saved, key=KEY)


def test_another_models_file_and_none_at_all_are_refused(
    library: NativeLibrary, saved: Path
) -> None:
    with pytest.raises(PackedFileError, match=r"packed from other weights.*float32.*another"):
        map_packed(library, saved, key="another")
    for path in (saved.parent / "missing", saved.parent):
        with pytest.raises(PackedFileError, match="cannot be read"):
            map_packed(library, path, key=KEY)


def test_a_failed_write_leaves_the_old_file(
    library: NativeLibrary, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_packed(saved, {"w": pack_float(library, torch.randn(3, 3))}, key=KEY)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
