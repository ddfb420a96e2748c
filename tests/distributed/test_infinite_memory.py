"""One rank trains a model whose parameters alone do not fit the memory that the process may have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
P = "parallelism."
ROOM = 160  # MiB of data that the process may allocate; the parameters have 195
MODEL = [
    *("data=synthetic", "data.vocab_size=64", "data.num_tokens=20000", "data.global_batch_size=2"),
    *("data.micro_batch_size=1", "model=gpt-lite", "model.num_layers=64", "model.num_heads=4", "model.d_model=256"),
    *("model.sequence_length=16", "data.sequence_length=16", "schedule=constant", "schedule.warmup_steps=1"),
    *("precision=fp32", "optimizer=adamw", "trainer.max_steps=10", "run.name=x", f"{P}zero=3"),
    *(f"{P}activation_checkpointing=full",),
]


def trained(room: int, steps: int, *more: str) -> tuple[dict, str]:
    """What a process with so much room has seen, and what it printed to stderr."""
    command = [sys.executable, "-m", "distributed.cells.limited", str(room), str(steps), *MODEL, *more]
    # Else glibc raises the size from which it maps blocks, and activations break up the heap between freed parameters.
    malloc = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"} | malloc
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}, done.stderr


@pytest.mark.slow
def test_parameters_that_do_not_fit_the_memory_are_trained_from_files(tmp_path: Path):
    files = [f"{P}offload=nvme", f"{P}offload_path={tmp_path}", f"{P}offload_buffer_mib=8"]
    found, words = trained(ROOM, 2, *files, f"{P}offload_parameters=true")
    assert found, words
    assert found["parameters"] > ROOM * 2**20
    for more in ([], files):
        nothing, words = trained(ROOM, 1, *more)
        assert not nothing
        assert "Cannot allocate memory" in words or "not enough memory" in words or "MemoryError" in words
    buffers, block = found["buffers"]
    # A block gathered, its gradients, the buffers of their reduction and its result; activations, Python's objects.
    assert found["most"] < buffers + 12 * block + 24 * 2**20
    everything, words = trained(0, 2)
    assert everything, words
    assert found["losses"] == everything["losses"]
