"""Packed weights go to a file and come back with the same bits; any other file is refused."""

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import NativeLinear
from kernels.cpu.packed_file import PackedFileWriter, map_packed
from kernels.cpu.packing import NativePacking
from kernels.cpu.weights import PackedLinear, pack_float, quantise_int4, quantise_int8
from kernels.interface.weights import PackedFileError
from tests.kernels.gguf_parts import random_part


def save_packed(path: Path, weights: Mapping[str, PackedLinear]) -> None:
    PackedFileWriter(path.parent, 1 << 20).finish(path, weights)()


def test_weights_come_back_with_the_same_bits_wherever_they_were_packed(
    library: NativeLibrary, tmp_path: Path
) -> None:
    linear = NativeLinear(library)
    w, bias = torch.randn(70, 75), torch.randn(70)
    path = tmp_path / "folder" / "packed"
    writer = PackedFileWriter(path.parent, 1 << 20)
    weights = {
        "float32": pack_float(library, w, bias),
        "int8": quantise_int8(library, w, reserve=writer.reserve),
        "int4": quantise_int4(library, w, bias, reserve=writer.reserve),
    }
    writer.finish(path, weights)()
    mapped = map_packed(library, path)
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
    save_packed(tmp_path / "packed", {"w": quantise_int8(library, torch.randn(40, 64))})
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
        map_packed(library, saved)


def test_another_models_file_and_none_at_all_are_refused(
    library: NativeLibrary, saved: Path
) -> None:
    with pytest.raises(PackedFileError, match=r"packed from other weights.*packed.*another"):
        map_packed(library, saved.rename(saved.with_name("another")))
    for path in (saved.parent / "missing", saved.parent):
        with pytest.raises(PackedFileError, match="cannot be read"):
            map_packed(library, path)


def test_a_failed_write_leaves_the_old_file(
    library: NativeLibrary, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*_: int) -> None:
        raise OSError("no space left")

    for name in ("os.fsync", "os.posix_fallocate"):
        monkeypatch.setattr(name, full)
        with pytest.raises(OSError, match="no space left"):
            save_packed(saved, {"w": pack_float(library, torch.randn(3, 3))})
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]


def test_a_file_that_is_not_finished_is_no_file_and_its_memory_stays(tmp_path: Path) -> None:
    writer = PackedFileWriter(tmp_path, 1 << 20)
    memory = writer.reserve(1000).fill_(7)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OSError, match="more than the 1 MiB"):
        writer.reserve(1 << 20)
    del writer
    assert not list(tmp_path.iterdir())
    assert bool((memory == 7).all())


def test_what_is_packed_leaves_the_process_until_it_is_used(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    writer = PackedFileWriter(tmp_path, 256 << 20)
    before_bytes = resident_bytes()
    packed = [writer.reserve(64 << 20).fill_(number) for number in range(3)]
    assert resident_bytes() - before_bytes < 100 << 20
    assert [int(each[-1]) for each in packed] == [0, 1, 2]


def test_a_crash_while_packing_leaves_nothing_that_is_taken_for_weights(
    library: NativeLibrary, tmp_path: Path
) -> None:
    writer = PackedFileWriter(tmp_path, 1 << 20)
    weights = {"w": quantise_int8(library, torch.randn(40, 64), reserve=writer.reserve)}
    writer.finish(tmp_path / "packed", weights)  # all but what waits for the disk
    (left,) = tmp_path.iterdir()
    with pytest.raises(PackedFileError, match="no file of packed weights"):
        map_packed(library, left)


def test_where_the_disk_is_full_weights_are_packed_into_other_memory(
    library: NativeLibrary, tmp_path: Path
) -> None:
    packing, part = NativePacking(library), random_part("Q4_1", 40, 64)
    packing.create(tmp_path, most_bytes=2000)
    packed = [packing.pack(name, [part]) for name in "ab"]
    for each in packed:
        assert isinstance(each, PackedLinear)
        rows = NativeLinear(library).gather_rows(torch.arange(40), each)
        assert torch.equal(rows, part.dequantise())
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="they take more than"):
        packing.save(tmp_path / "model.weights")
