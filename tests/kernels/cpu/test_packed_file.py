"""Packed weights go to a file and come back with the same bits; any other file is refused."""

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


def test_a_mapped_weight_outlives_its_siblings(library: NativeLibrary, tmp_path: Path) -> None:
    linear = NativeLinear(library)
    weights = {name: pack_float(library, torch.randn(40, 64)) for name in ("a", "b")}
    save_packed(tmp_path / "packed", weights, key=KEY)
    kept = map_packed(library, tmp_path / "packed", key=KEY)["b"]
    x = torch.randn(2, 64)
    assert torch.equal(linear(x, kept), linear(x, weights["b"]))


@pytest.fixture
def saved(library: NativeLibrary, tmp_path: Path) -> Path:
    save_packed(tmp_path / "packed", {"w": quantise_int8(library, torch.randn(40, 64))}, key=KEY)
    return tmp_path / "packed"


@pytest.mark.parametrize("num_bytes", [0, 10, 63, 64, 100, 300, -1])
def test_a_file_cut_short_is_refused(library: NativeLibrary, saved: Path, num_bytes: int) -> None:
    saved.write_bytes(saved.read_bytes()[:num_bytes])
    with pytest.raises(PackedFileError, match="bytes"):
        map_packed(library, saved, key=KEY)


def test_a_file_that_grew_is_refused(library: NativeLibrary, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"more")
    with pytest.raises(PackedFileError, match="should have"):
        map_packed(library, saved, key=KEY)


def test_a_foreign_file_is_refused(library: NativeLibrary, saved: Path) -> None:
    saved.write_bytes(b"GGUF" + saved.read_bytes()[4:])
    with pytest.raises(PackedFileError, match="no file of packed weights"):
        map_packed(library, saved, key=KEY)
    with pytest.raises(PackedFileError, match="cannot be read"):
        map_packed(library, saved.parent / "missing", key=KEY)
    with pytest.raises(PackedFileError, match="cannot be read"):
        map_packed(library, saved.parent, key=KEY)


def test_a_change_in_the_header_is_refused(library: NativeLibrary, saved: Path) -> None:
    right = saved.read_bytes()
    for number in (b'"outputs": 40', b'"inputs": 64'):
        assert number in right
        saved.write_bytes(right.replace(number, number[:-2] + b"99"))
        with pytest.raises(PackedFileError, match="damaged header"):
            map_packed(library, saved, key=KEY)


def test_weights_of_another_model_are_refused(library: NativeLibrary, saved: Path) -> None:
    with pytest.raises(PackedFileError, match=r"packed from other weights.*float32.*another"):
        map_packed(library, saved, key="another")


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
