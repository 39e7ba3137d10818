"""Memory as this system reports it."""

import os

from protocol import memory


def test_the_system_reports_memory_and_a_process_has_some():
    assert memory.available_memory_bytes() > 0
    assert memory.process_memory_bytes(os.getpid()) > 2**20
    assert memory.process_memory_bytes(2**30) is None


def test_files_that_a_control_group_has_read_are_available(monkeypatch, tmp_path):
    group = (str(tmp_path), "memory.max", "memory.current", "inactive_file ")
    monkeypatch.setattr(memory, "_GROUPS", (group,))
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 100\n")
    assert memory.available_memory_bytes() == 400
    assert memory.group_limit_bytes() == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory_bytes() > 400
    assert memory.group_limit_bytes() is None
