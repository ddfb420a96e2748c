"""Benchmark of model state in files: step time, bytes moved and memory, beside the speed of the disk.

    python tools/bench_infinite.py path=/nvme [place=infinite|nvme|cpu|none|all] [limit_mib=600] [buffer_mib=64]
        [layers=12] [width=768] [steps=3] [accumulation=1] [out=rows.json]

Trains a GPT on one rank. `place` is infinite (all model state in files), or a value of parallelism.offload; `all` runs
each in a process of its own, prints a table, and writes its rows to `out` for tools/plot_infinite.py. `limit_mib`
limits the memory that the process may allocate once a tiny model has been trained, RLIMIT_DATA of the kernel, which
does not count the page cache. In a table, places that fail under the limit are run once more without it.

The speed of the disk is measured with O_DIRECT, in requests of 1 MiB, 8 at a time, on the files of the run, after the
steps. `disk` is the time in which it moves the bytes of a step, reads and writes one after the other. glibc keeps freed
parameters of up to 32 MB; MALLOC_MMAP_THRESHOLD_=65536 in the environment makes it return them, and a table sets it.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from bench_offload import disk_rates
from omegaconf import MISSING

from gptlite.config import Config, load
from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.nvme.infinite import InfiniteStream
from gptlite.satellites.nvme.state_file import StateFile
from gptlite.satellites.nvme.streamed import StateStream
from gptlite.satellites.parity.record import build

MB, MIB = 1e6, 2**20
PLACES = ("infinite", "nvme", "cpu", "none")
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
MEASURED = 2**30  # bytes of a file at most, on which the speed of the disk is measured


@dataclass
class Arguments:
    """Command-line arguments."""

    path: str = MISSING  # a folder on the disk
    place: str = "infinite"
    limit_mib: int = 0  # 0: no limit
    buffer_mib: int = 64  # parallelism.offload_buffer_mib
    layers: int = 12
    width: int = 768
    steps: int = 3
    accumulation: int = 1
    out: str = ""  # file for the rows of a table
    json: bool = False  # print the measured values as one line of JSON


@dataclass
class Measured:
    """Measured values: bytes and seconds, per step where they are of a step."""

    weights: int
    step: float
    memory: int  # largest anonymous memory above that at the start
    read: float = 0
    written: float = 0
    disk: float = 0  # seconds in which the disk moves these bytes
    rates: tuple[float, float] = (0, 0)  # bytes per second, written and read
    buffers: int = 0
    block: int = 0


class MemoryPeak:
    """Largest anonymous memory of this process, sampled every 50 ms. The page cache does not count."""

    def __init__(self) -> None:
        self.most, self._stop = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, status("RssAnon"))


def status(field: str) -> int:
    """Return the bytes in a field of this process's status, such as RssAnon or VmData."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def config_of(options: Arguments) -> Config:
    """Return the configuration of the run."""
    offload = {"infinite": "nvme"}.get(options.place, options.place)
    files = [f"parallelism.offload_path={options.path}", f"parallelism.offload_buffer_mib={options.buffer_mib}"]
    return load(
        [
            *("data=synthetic", "data.vocab_size=256", "data.num_tokens=100000", "data.micro_batch_size=1"),
            *(f"data.global_batch_size={options.accumulation}", "model=gpt-lite", "optimizer=adamw", "precision=fp32"),
            *(f"model.num_layers={options.layers}", f"model.d_model={options.width}", "model.sequence_length=256"),
            *("data.sequence_length=256", "schedule=constant", "schedule.warmup_steps=1", "run.name=bench"),
            *("parallelism.zero=3", "parallelism.activation_checkpointing=full", f"parallelism.offload={offload}"),
            *(f"parallelism.offload_parameters={str(options.place == 'infinite').lower()}",),
            *(files if offload == "nvme" else []),
        ]
    )


def measure(options: Arguments) -> Measured:
    """Train, and measure. Under `limit_mib`, raises RuntimeError or MemoryError if the model does not fit."""
    threading.stack_size(256 * 1024)  # of the threads for reads and writes: the limit counts whole stacks
    if options.limit_mib:
        _train(replace(options, layers=2, width=64, steps=1))  # imports, and starts threads
        limit = status("VmData") + options.limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return _train(options)


def _train(options: Arguments) -> Measured:
    config = config_of(options)
    before, peak, mesh = status("RssAnon"), MemoryPeak(), build_mesh(config.parallelism)
    state, step = build(config, mesh)
    with closing(state.loader):
        stream = getattr(state.optimizer, "stream", None)
        step(state)
        start, begin = _moved(stream), time.perf_counter()
        for _ in range(options.steps):
            step(state)
        stop = _moved(stream)
        measured = Measured(
            sum(4 * each.numel() for part in state.parts for each in part.parameters()),
            (time.perf_counter() - begin) / options.steps,
            peak.most - before,
        )
        if stream is not None:
            measured.read, measured.written = (
                (after - at) / options.steps for at, after in zip(start, stop, strict=True)
            )
            measured.buffers = sum(each.nbytes for each in stream.resident())
            stream.settle()
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
            file = _files(stream)[-1]
            measured.rates = disk_rates(file, min(file.size, MEASURED))
            if isinstance(stream, InfiniteStream):
                measured.block = len(stream.parameters.buffers[0])
                measured.read += measured.weights  # the gradient norm, through the memory map
            measured.disk = measured.written / measured.rates[0] + measured.read / measured.rates[1]
    mesh.close()
    return measured


def _files(stream: StateStream) -> list[StateFile]:
    return [stream.file, *([stream.parameters.file] if isinstance(stream, InfiniteStream) else [])]


def _moved(stream: StateStream | None) -> tuple[int, int]:
    """Return the bytes read and written so far. What is under way belongs to the step before."""
    if stream is None:
        return 0, 0
    stream.wait()
    files = _files(stream)
    return sum(file.bytes_read for file in files), sum(file.bytes_written for file in files)


def words(options: Arguments, measured: Measured) -> str:
    """Return the measured values in lines."""
    lines = [
        f"{options.place}: {measured.weights / MB:.0f} MB of parameters, accumulation {options.accumulation}, "
        f"{torch.get_num_threads()} threads",
        f"step           {measured.step:.2f} s; reads {measured.read / MB:.0f} MB, "
        f"writes {measured.written / MB:.0f} MB",
        f"memory         {measured.memory / MB:.0f} MB above that at the start",
    ]
    if measured.disk:
        blocks = f", for blocks of {measured.block / MB:.0f} MB" if measured.block else ""
        lines += [
            f"buffers        {measured.buffers / MB:.0f} MB{blocks}",
            f"disk           writes {measured.rates[0] / MB:.0f} MB/s, reads {measured.rates[1] / MB:.0f} MB/s: "
            f"{measured.disk:.2f} s for these bytes; a step takes {measured.step / measured.disk:.2f} of it",
        ]
    return "\n".join(lines)


def child(options: Arguments) -> Measured | None:
    """Return what a process of its own measures, or None if it fails for lack of memory. Raises RuntimeError."""
    values = [
        f"{each.name}={getattr(options, each.name)}" for each in fields(options) if each.name not in ("json", "out")
    ]
    command = [sys.executable, __file__, *values, "json=true"]
    done = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True)
    if done.returncode == 0:
        return Measured(**json.loads(done.stdout.splitlines()[-1]))
    reasons = "annot allocate memory", "not enough memory", "MemoryError", "can't start new thread"
    if options.limit_mib and any(reason in done.stderr for reason in reasons):
        return None
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def table(options: Arguments) -> None:
    """Print a row per place, and write them to `out`."""
    rows = []
    print("| place | parameters | limit | step | reads | writes | disk | step / disk | memory |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for place in PLACES:
        measured = child(replace(options, place=place))
        limit = f"{options.limit_mib} MiB" if options.limit_mib else "none"
        if measured is None:
            print(f"| `{place}` | | {limit} | does not fit | | | | | |")
            measured, limit = child(replace(options, place=place, limit_mib=0)), "none"
        assert measured is not None
        print(_row(place, limit, measured), flush=True)
        rows.append({"place": place, "limit_mib": options.limit_mib if limit != "none" else 0, **vars(measured)})
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")


def _row(place: str, limit: str, measured: Measured) -> str:
    cells: list[Any] = [f"`{place}`", f"{measured.weights / MB:.0f} MB", limit, f"{measured.step:.2f} s"]
    moved = [f"{measured.read / MB:.0f} MB", f"{measured.written / MB:.0f} MB", f"{measured.disk:.2f} s"]
    cells += [*moved, f"{measured.step / measured.disk:.2f}"] if measured.disk else [""] * 4
    return f"| {' | '.join([*cells, f'{measured.memory / MB:.0f} MB'])} |"


def main(options: Arguments) -> None:
    """Print the results. Raises ConfigError for an unknown place."""
    if options.place not in (*PLACES, "all"):
        raise ConfigError(f"place={options.place} is not one of {', '.join(PLACES)}, all")
    if options.place == "all":
        table(options)
        return
    measured = measure(options)
    print(json.dumps(vars(measured)) if options.json else words(options, measured))


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
