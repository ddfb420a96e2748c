"""Memory of this process, against memory that it takes."""

import sys

import torch
from monitor.pages import new_pages

from gptlite.satellites.monitor.process_memory import memory_in_use, resident_bytes


def test_memory_of_a_cpu_run_follows_what_it_touches():
    before = memory_in_use(torch.device("cpu"))
    block = new_pages(64 * 2**20)
    after = memory_in_use(torch.device("cpu"))
    assert set(after) == {"memory_allocated_bytes", "memory_peak_bytes"}
    if sys.platform == "linux":
        allocated, peak = after["memory_allocated_bytes"] or 0, after["memory_peak_bytes"] or 0
        assert allocated - (before["memory_allocated_bytes"] or 0) > 0.9 * block.size
        assert peak >= allocated


def test_the_peak_is_the_process_s_own(tmp_path):
    """ru_maxrss, which a child takes over from a large parent, counts only where the kernel has no better figure."""
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t   2000 kB\nVmRSS:\t   1000 kB\n")
    assert resident_bytes(tmp_path / "status") == (1000 * 1024, 2000 * 1024)
    (tmp_path / "status").write_text("VmRSS:\t   1000 kB\n")
    current, peak = resident_bytes(tmp_path / "status")
    assert current == 1000 * 1024
    assert peak > 10 * 2**20


def test_without_proc_the_peak_remains(tmp_path):
    current, peak = resident_bytes(tmp_path / "absent")
    assert current is None
    assert peak > 10 * 2**20
