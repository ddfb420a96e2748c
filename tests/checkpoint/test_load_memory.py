"""Loading takes the memory of what is loaded and of one stored piece, not of the checkpoint."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from distributed.cells.run import run_ranks

from gptlite.checkpoint.load import load_tensors

PIECE = 16 << 20  # bytes of the largest stored box
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def peak() -> int:
    """The largest amount of memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def load(folder: Path, rows: int, count: int) -> int:
    """The bytes that loading so many tensors takes besides them."""
    into = {f"w{index}": torch.ones(rows, 1024) for index in range(count)}
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = peak()
    load_tensors(folder, into, strict=False, log=lambda _: None)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(into.values()))
    return peak() - before


def loads(folder: Path, rows: int) -> list[int]:
    """Of few tensors and of many, in a process of one's own."""
    # What is freed goes back at once: the allocator's own hoarding is not what is measured.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1
    load(folder, rows, 1)  # what the libraries need once
    return [load(folder, rows, 2), load(folder, rows, 8)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_than_one_piece_besides(checkpointer, tmp_path):
    rows = PIECE // 4096
    tensors = {f"w{index}": torch.full((rows, 1024), float(index)) for index in range(8)}
    folder = checkpointer.save(tensors, {"step": 1}, "", None, print)
    ((few, many),) = run_ranks(1, "checkpoint.test_load_memory:loads", folder, rows, timeout=120, join=False)
    assert few < PIECE + (4 << 20)
    assert many < PIECE + (4 << 20)
