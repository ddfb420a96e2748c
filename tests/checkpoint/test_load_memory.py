"""Loading takes the memory of what is loaded and of one stored piece, not of the checkpoint."""

import json
import os
import subprocess
import sys

import pytest
import torch

PIECE = 16 << 20  # bytes of the largest stored box

PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from gptlite.checkpoint.load import load_tensors

rows, folder = int(sys.argv[1]), sys.argv[2]

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

def load(count):
    into = {f"w{index}": torch.ones(rows, 1024) for index in range(count)}
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
    before = peak()
    load_tensors(__import__("pathlib").Path(folder), into, strict=False, log=lambda _: None)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(into.values()))
    return peak() - before

load(1)  # what the libraries need once
print(json.dumps([load(2), load(8)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_than_one_piece_besides(checkpointer, tmp_path):
    rows = PIECE // 4096
    tensors = {f"w{index}": torch.full((rows, 1024), float(index)) for index in range(8)}
    folder = checkpointer.save(tensors, {"step": 1}, "", None, print)
    command = [sys.executable, "-c", PROGRAM, str(rows), str(folder)]
    # What is freed goes back at once: the allocator's own hoarding is not what is measured.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    few, many = json.loads(result.stdout)
    assert few < PIECE + (4 << 20)
    assert many < PIECE + (4 << 20)
