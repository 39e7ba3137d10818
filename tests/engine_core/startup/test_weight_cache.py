"""Packed weights on disk: what a file is named by, what is refused, and which go first."""

import logging
import os

import pytest

from engine_core.startup.weight_cache import PackedWeightCache
from kernels.cpu.packed_file import PackedFileWriter
from kernels.interface.weights import PackedFileError


class FakePacking:
    """Files hold text: "good" is taken. Nothing waits for the disk."""

    def __init__(self, num_bytes=100):
        self.num_bytes = num_bytes
        self.taken = False
        self.is_new = True

    def open(self, file):
        if file.read_text()[:4] != "good":
            raise PackedFileError(f"{file} is no file of packed weights")
        self.taken, self.is_new = True, False

    def num_bytes_to_save(self):
        return self.num_bytes if self.is_new else 0

    def create(self, folder, most_bytes):
        if most_bytes < self.num_bytes:
            raise OSError("full")

    def save(self, file, made_of):
        assert self.is_new
        return lambda: file.write_text("good".ljust(self.num_bytes, "."))


def open_(cache, packing, file):
    cache.open(packing, file, least_bytes=packing.num_bytes)
    return packing.taken


def save(cache, packing, file):
    if (thread := cache.save(packing, file, [])) is not None:
        thread.join()


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    os.utime(file, (1000, 1000))
    return file


@pytest.fixture
def cache(tmp_path):
    return PackedWeightCache(tmp_path / "cache", 1000)


def test_what_one_start_has_kept_the_next_one_takes(cache, model):
    file = cache.file_for("abc", [model], "blocks")
    first, second = FakePacking(), FakePacking()
    assert not open_(cache, first, file)
    save(cache, first, file)
    assert open_(cache, second, file)
    assert second.taken
    save(cache, second, file)  # nothing is new: not written again


def test_a_file_is_named_by_contents_times_and_format(cache, model, tmp_path):
    names = {cache.file_for("abc", [model], "blocks")}
    names.add(cache.file_for("abc", [model], "int8"))
    names.add(cache.file_for("def", [model], "blocks"))
    names.add(cache.file_for("abc", [model, model], "blocks"))
    os.utime(model, (1000, 1001))
    names.add(cache.file_for("abc", [model], "blocks"))
    model.write_bytes(b"weights and more")
    os.utime(model, (1000, 1000))
    names.add(cache.file_for("abc", [model], "blocks"))
    assert len(names) == 6
    moved = model.rename(tmp_path / "moved.gguf")
    assert cache.file_for("abc", [moved], "blocks") in names


def test_a_file_that_is_refused_goes_with_one_line(cache, model, caplog):
    file = cache.file_for("abc", [model], "blocks")
    file.parent.mkdir()
    file.write_text("foreign")
    packing = FakePacking()
    with caplog.at_level(logging.WARNING):
        assert not open_(cache, packing, file)
    assert not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"the weights are packed anew: {file} is no file of packed weights"
    ]
    save(cache, packing, file)
    assert open_(cache, FakePacking(), file)


def test_those_used_longest_ago_make_room(cache, model):
    files = [cache.file_for(str(number), [model], "blocks") for number in range(4)]
    for number, file in enumerate(files[:3]):
        save(cache, FakePacking(300), file)
        os.utime(file, (number, number))
    assert open_(cache, FakePacking(), files[0])  # used now
    save(cache, FakePacking(300), files[3])
    assert [file.exists() for file in files] == [True, False, True, True]
    save(cache, FakePacking(1000), files[1])
    assert [file.exists() for file in files] == [False, True, False, False]


def test_what_somebody_who_died_was_writing_goes(cache, model):
    cache.folder.mkdir()
    left = cache.folder / "packing-old"
    left.write_text("half")
    writer = PackedFileWriter(cache.folder, 100)
    (written,) = {*cache.folder.iterdir()} - {left}
    file = cache.file_for("abc", [model], "blocks")
    save(cache, FakePacking(), file)
    assert {*cache.folder.iterdir()} == {written, file}
    del writer


def test_weights_larger_than_the_limit_are_not_kept_and_push_nothing_out(cache, model, caplog):
    kept = cache.file_for("abc", [model], "blocks")
    save(cache, FakePacking(300), kept)
    with caplog.at_level(logging.INFO):
        save(cache, FakePacking(1001), kept.with_name("big.weights"))
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]
    assert "--weight-cache" in caplog.text


def test_a_limit_of_nothing_reads_and_writes_nothing(cache, model, tmp_path):
    file = cache.file_for("abc", [model], "blocks")
    off = PackedWeightCache(cache.folder, 0)
    save(off, FakePacking(), file)
    assert not cache.folder.exists()
    save(cache, FakePacking(), file)
    packing = FakePacking()
    assert not open_(off, packing, file)
    assert not packing.taken


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(model, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = PackedWeightCache(tmp_path / "file" / "cache", 1000)
    file = cache.file_for("abc", [model], "blocks")
    with caplog.at_level(logging.WARNING):
        save(cache, FakePacking(), file)
    assert "cannot be kept for the next start" in caplog.text
