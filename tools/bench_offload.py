"""Benchmark of optimizer state in files: additional time per step, compared with the speed of the disk.

    python tools/bench_offload.py path=/nvme [elements=64e6] [buffer_mib=64] [steps=4]

Times AdamW steps over `elements` parameters, first with the state in memory, then in a file. No model runs between the
steps, so no computation overlaps with disk transfers. The speed of the disk is measured by writing and reading the same
number of bytes with O_DIRECT, in requests of 1 MiB, 8 at a time.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import nn

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import select_ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamWConfig
from gptlite.satellites.nvme.state_file import StateFile, aligned
from gptlite.satellites.nvme.streamed import StreamedOptimizer, stream_state


@dataclass
class Arguments:
    """Command-line arguments."""

    path: str = MISSING  # a folder on the disk
    elements: float = 64e6
    buffer_mib: int = 64
    steps: int = 4


def main(options: Arguments) -> None:
    """Print the results. Raises ConfigError if `path` is not a folder."""
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"path={options.path} is not a folder; create it, or give another path")
    fused = select_ops(OpsConfig(), torch.device("cpu")).adamw
    parameter = nn.Parameter(torch.randn(int(options.elements)))
    parameter.grad = torch.randn_like(parameter)
    optimizer = build_optimizer(AdamWConfig(), [("p", parameter)], fused_adam=fused)
    plain = seconds_a_step(optimizer, options.steps)
    optimizer.state.clear()
    optimizer = stream_state(optimizer, folder, options.buffer_mib * 2**20)
    assert isinstance(optimizer, StreamedOptimizer)
    streamed = seconds_a_step(optimizer, options.steps)
    file = optimizer.stream.file
    optimizer.settle()  # waits for pending transfers, before the disk is measured
    size, direct = file.size, file.direct
    written, read = disk_rates(file, size)
    floor = size / written + size / read
    print(f"{options.elements / 1e6:.0f}M parameters, {size / 1e6:.0f} MB of state, {torch.get_num_threads()} threads, "
          f"{'O_DIRECT' if direct else 'page cache'}, two buffers of {options.buffer_mib} MiB")  # fmt: skip
    print(f"disk           writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s: {floor:.3f} s for the state")
    print(f"in memory      {plain:.3f} s per step")
    print(f"in a file      {streamed:.3f} s per step, {streamed - plain:.3f} s more: {(streamed - plain) / floor:.2f} "
          f"of the disk time")  # fmt: skip


def seconds_a_step(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return the mean seconds per step, including pending writes, after an untimed step."""
    optimizer.step()
    if isinstance(optimizer, StreamedOptimizer):
        optimizer.stream.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    if isinstance(optimizer, StreamedOptimizer):
        optimizer.stream.wait()
    return (time.perf_counter() - begin) / steps


def disk_rates(file: StateFile, size: int) -> tuple[float, float]:
    """Return the bytes per second of writing and of reading the whole file in chunks, without other work."""
    chunk = 64 * 2**20
    memory = aligned(chunk)
    rates = []
    for move in (file.write, file.read):
        begin = time.perf_counter()
        for start in range(0, size, chunk):
            move([(start, memory[: min(chunk, size - start)])])
        rates.append(size / (time.perf_counter() - begin))
    return rates[0], rates[1]


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
