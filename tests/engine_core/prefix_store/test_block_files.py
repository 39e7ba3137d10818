"""Whatever is written, cut off, spoiled or left behind in a folder, no wrong block is read."""

import os
import stat

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine_core.prefix_store import BlockFiles, BrokenBlock, UnsafeFolder
from tests.profiles import examples

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
BLOCK_BYTES = 100
MINUTE_NS = 60 * 10**9


def block(number, group=0):
    return group, bytes([number]) * 64


def contents(number, group=0):
    return bytes([number, group]) * (BLOCK_BYTES // 2)


class Clock:
    def __init__(self):
        self.now_ns = 10**18

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    def make(num_blocks=100, key=KEY, block_bytes=BLOCK_BYTES):
        size = 12 + 16 + 4 + 64 + 8 + block_bytes + 32
        return BlockFiles(
            tmp_path / "blocks",
            limit_bytes=num_blocks * size,
            key=key,
            group_bytes=[*[block_bytes] * 3, block_bytes // 2],
            clock_ns=clock,
        )

    return make


def test_a_block_comes_back_in_another_process_by_its_hash_and_group(make):
    files = make()
    files.write(block(1), 0, contents(1))
    shorter = contents(1, 3)[: BLOCK_BYTES // 2]
    files.write(block(1, 3), 0, shorter)
    again = make()
    assert again.scan() == ({block(1), block(1, 3)}, set())
    assert again.read(block(1)) == contents(1)
    assert again.read(block(1, 3)) == shorter
    assert again.read(block(2)) is None


def test_only_the_owner_may_read_what_prompts_left(make):
    files = make()
    before = os.umask(0)
    try:
        files.write(block(1), 0, contents(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(files.path_of(block(1)).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(make, mode):
    folder = make().folder
    folder.chmod(mode)
    with pytest.raises(UnsafeFolder, match=f"mode {mode:o}.*chmod it to 700"):
        make()


def test_a_folder_of_another_user_is_refused(make, monkeypatch):
    make()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeFolder, match="belongs to user"):
        make()


def test_blocks_of_another_model_are_neither_found_nor_read(make):
    make(key=OTHER_KEY).write(block(1), 0, contents(1))
    files = make()
    assert files.scan() == (set(), set())
    assert files.num_others == 1
    assert files.read(block(1)) is None


def test_a_block_under_the_name_of_another_is_refused(make):
    files = make()
    files.write(block(1), 0, contents(1))
    files.path_of(block(1)).rename(files.path_of(block(2)))
    with pytest.raises(BrokenBlock, match="of another block"):
        files.read(block(2))
    make(key=OTHER_KEY).write(block(3), 0, contents(3))
    make(key=OTHER_KEY).path_of(block(3)).rename(files.path_of(block(3)))
    with pytest.raises(BrokenBlock, match="of another block"):
        files.read(block(3))


def test_a_link_is_not_followed(make, tmp_path):
    files = make()
    files.write(block(1), 0, contents(1))
    files.path_of(block(1)).rename(tmp_path / "elsewhere")
    files.path_of(block(1)).symlink_to(tmp_path / "elsewhere")
    assert files.scan() == (set(), set())
    with pytest.raises(OSError, match="symbolic links"):
        files.read(block(1))


@settings(max_examples=examples(200))
@given(data=st.data())
def test_no_changed_byte_and_no_cut_goes_unseen(data, tmp_path_factory):
    files = BlockFiles(
        tmp_path_factory.mktemp("blocks"), limit_bytes=10**6, key=KEY, group_bytes=[BLOCK_BYTES]
    )
    files.write(block(1), 0, contents(1))
    path = files.path_of(block(1))
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(whole) - 1))
        broken = bytearray(whole)
        broken[place] ^= data.draw(st.integers(1, 255))
    else:
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
        broken += data.draw(st.sampled_from([b"", b"\0" * (len(whole) - len(broken)), b"x" * 999]))
    if bytes(broken) == whole:
        return
    path.write_bytes(broken)
    with pytest.raises(BrokenBlock):
        files.read(block(1))


def test_the_folder_stays_within_its_bytes_and_the_least_recently_used_go_first(make, clock):
    files = make(num_blocks=32)
    known = set()
    for number in range(100):
        clock.now_ns += 2 * MINUTE_NS
        files.touch(block(0), 0)
        known.add(block(number))
        known -= files.write(block(number), 0, contents(number))
        used = sum(path.stat().st_size for path in files.folder.iterdir())
        assert used <= 32 * files.file_bytes
    assert {files.path_of(each) for each in known} == set(files.folder.iterdir())
    assert block(0) in known
    assert {block(number) for number in range(80, 100)} <= known
    assert block(50) not in known


def test_of_one_prompt_the_last_blocks_go_first(make):
    files = make(num_blocks=32)
    for number in range(26):
        files.write(block(number), number, contents(number))
    known, _ = make(num_blocks=16).scan()
    assert known == {block(number) for number in range(13)}


def test_a_smaller_limit_holds_from_the_start_and_for_other_models_too(make):
    files = make(num_blocks=100, key=OTHER_KEY)
    for number in range(60):
        files.write(block(number), 0, contents(number))
    make(num_blocks=32).scan()
    assert len(list(files.folder.iterdir())) <= 28


def test_what_a_killed_writer_left_goes_and_other_files_stay(make, clock):
    files = make()
    files.write(block(1), 0, contents(1))
    half = files.path_of(block(2)).with_name(files.path_of(block(2)).name + ".123.tmp")
    half.write_bytes(b"half")
    os.utime(half, ns=(clock.now_ns, clock.now_ns))
    mine = files.folder / "notes.txt"
    mine.write_text("mine")
    assert files.scan() == ({block(1)}, set())
    assert half.exists()
    clock.now_ns += 2 * MINUTE_NS
    files.scan()
    assert not half.exists()
    assert mine.read_text() == "mine"
    assert files.num_others == 1


def test_a_full_disk_leaves_nothing_of_the_block(make, monkeypatch):
    files = make()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(OSError, match="No space"):
        files.write(block(1), 0, contents(1))
    assert list(files.folder.iterdir()) == []


class TwoWriters(RuleBasedStateMachine):
    """Two processes in one folder, any order of what they and a failing disk do."""

    @initialize(num_blocks=st.integers(16, 40))
    def start(self, num_blocks):
        import tempfile
        from pathlib import Path

        self.holder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        size = 12 + 16 + 4 + 64 + 8 + BLOCK_BYTES + 32
        self.writers = [
            BlockFiles(
                Path(self.holder.name),
                limit_bytes=num_blocks * size,
                key=KEY,
                group_bytes=[BLOCK_BYTES],
                clock_ns=self.clock,
            )
            for _ in range(2)
        ]
        self.limit_bytes = num_blocks * size
        self.folder = Path(self.holder.name)

    @rule(who=st.integers(0, 1), number=st.integers(0, 60), index=st.integers(0, 10**6))
    def write(self, who, number, index):
        self.writers[who].write(block(number), index, contents(number))

    @rule(who=st.integers(0, 1), number=st.integers(0, 60))
    def read(self, who, number):
        try:
            found = self.writers[who].read(block(number))
        except BrokenBlock:
            self.writers[who].delete(block(number))
        else:
            assert found in (None, contents(number))

    @rule(who=st.integers(0, 1), number=st.integers(0, 60))
    def touch(self, who, number):
        self.writers[who].touch(block(number), 0)

    @rule(number=st.integers(0, 60), length=st.integers(0, 300))
    def die_while_writing(self, number, length):
        """Only the temporary file can be incomplete."""
        path = self.writers[0].path_of(block(number))
        path.with_name(f"{path.name}.77.tmp").write_bytes(contents(number)[:length])

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(data=st.data(), place=st.integers(0, 400))
    def spoil(self, data, place):
        path = data.draw(st.sampled_from(sorted(self.folder.iterdir())))
        broken = bytearray(path.read_bytes())
        if place < len(broken):
            broken[place] ^= 1
        else:
            broken += b"more"
        path.write_bytes(broken)

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds):
        self.clock.now_ns += seconds * 10**9

    @rule()
    def scan(self):
        found, _ = self.writers[0].scan()
        assert {self.writers[0].path_of(each) for each in found} <= set(self.folder.iterdir())
        used = sum(path.stat().st_size for path in self.folder.iterdir())
        assert used <= self.limit_bytes

    def teardown(self):
        if hasattr(self, "holder"):
            self.holder.cleanup()


TestTwoWriters = TwoWriters.TestCase
TestTwoWriters.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
