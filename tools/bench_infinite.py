"""Benchmark of parameters and gradients in files: step time, bytes moved and memory, beside the speed of the disk.

    python tools/bench_infinite.py path=/nvme [place=infinite|nvme|cpu|none] [layers=12] [width=768] [steps=3]

Trains a GPT on one rank. `place` is infinite (all model state in files), or a value of parallelism.offload. The speed
of the disk is measured with O_DIRECT, in requests of 1 MiB, 8 at a time, on the files of the run. glibc keeps freed
parameters of up to 32 MB; MALLOC_MMAP_THRESHOLD_=65536 in the environment makes it return them.
"""

import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_offload import disk_rates
from omegaconf import MISSING

from gptlite.config import load
from gptlite.config.command_line import run_tool
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.nvme.infinite import InfiniteStream
from gptlite.satellites.parity.record import build

MB = 1e6


@dataclass
class Arguments:
    """Command-line arguments."""

    path: str = MISSING  # a folder on the disk
    place: str = "infinite"
    layers: int = 12
    width: int = 768
    steps: int = 3
    accumulation: int = 1


class MemoryPeak:
    """Largest anonymous memory of this process, sampled every 50 ms. The page cache does not count."""

    def __init__(self) -> None:
        self.most, self._stop = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def main(options: Arguments) -> None:
    """Print the results."""
    offload = {"infinite": "nvme"}.get(options.place, options.place)
    files = [f"parallelism.offload_path={options.path}"] if offload == "nvme" else []
    config = load(
        [
            *("data=synthetic", "data.vocab_size=256", "data.num_tokens=100000", "data.micro_batch_size=1"),
            *(f"data.global_batch_size={options.accumulation}", "model=gpt-lite", "optimizer=adamw", "precision=fp32"),
            *(f"model.num_layers={options.layers}", f"model.d_model={options.width}", "model.sequence_length=256"),
            *("data.sequence_length=256", "schedule=constant", "schedule.warmup_steps=1", "run.name=bench"),
            *("parallelism.zero=3", "parallelism.activation_checkpointing=full", f"parallelism.offload={offload}"),
            *(f"parallelism.offload_parameters={str(options.place == 'infinite').lower()}", *files),
        ]
    )
    before = anonymous_bytes()
    peak, mesh = MemoryPeak(), build_mesh(config.parallelism)
    state, step = build(config, mesh)
    with closing(state.loader):
        stream = getattr(state.optimizer, "stream", None)
        moved = [] if stream is None else [stream.file]
        moved += [stream.parameters.file] if isinstance(stream, InfiniteStream) else []
        step(state)
        if stream is not None:
            stream.wait()
        read, written = sum(file.bytes_read for file in moved), sum(file.bytes_written for file in moved)
        begin = time.perf_counter()
        for _ in range(options.steps):
            step(state)
        if stream is not None:
            stream.wait()
        seconds = (time.perf_counter() - begin) / options.steps
        read = (sum(file.bytes_read for file in moved) - read) / options.steps
        written = (sum(file.bytes_written for file in moved) - written) / options.steps
    weights = sum(4 * each.numel() for part in state.parts for each in part.parameters())
    print(f"{options.place}: {weights / MB:.0f} MB of parameters, accumulation {options.accumulation}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print(f"step           {seconds:.2f} s; reads {read / MB:.0f} MB, writes {written / MB:.0f} MB")
    print(f"memory         {(peak.most - before) / MB:.0f} MB above {before / MB:.0f} MB at the start")
    if isinstance(stream, InfiniteStream):
        pool, block = stream.parameters.buffers, len(stream.parameters.buffers[0])
        buffers = sum(each.nbytes for each in stream.resident())
        print(f"buffers        {buffers / MB:.0f} MB, of which {len(pool)} of a block of {block / MB:.0f} MB")
        stream.settle()
        out, into = disk_rates(stream.parameters.file, stream.parameters.file.size)
        floor = read / into + written / out
        print(f"disk           writes {out / MB:.0f} MB/s, reads {into / MB:.0f} MB/s: {floor:.2f} s for these bytes")
    mesh.close()


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
