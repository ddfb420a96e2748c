"""Benchmark of the data loader: tokens per second, and fraction of the time of a training step.

    python tools/bench_loader.py [tokens=200e6] [steps=20] [repeats=5] [KEY=VALUE of train.py]

The first part reads a file of random uint16 tokens from the page cache on one core, with the background thread that
training uses. It prints a table for one data set and a blend of two, at several sequence lengths. The second part times
a step of the configured run, and prints the fraction of it that reading the batches would take without overlap.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import in_turn, own_arguments, seconds

from gptlite.commands.train import guarded
from gptlite.config import load
from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import HeldOut, Loader
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError
from gptlite.metrics.console import table
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh

VOCABULARY = 50_000
LENGTHS = (256, 1024, 4096)  # sequence lengths
READ = 20e6  # tokens per measurement


@dataclass
class Arguments:
    """Arguments of this tool. Other arguments are overrides of train.py."""

    tokens: float = 200e6
    steps: int = 20
    repeats: int = 5


def main(arguments: list[str]) -> int:
    """Print both results and return the exit code. Raises ConfigError for invalid arguments."""
    settings, overrides = own_arguments(Arguments, arguments, __doc__)
    if settings.tokens < 10 * LENGTHS[-1] or min(settings.steps, settings.repeats) < 1:
        raise ConfigError(
            f"tokens={settings.tokens:g} must be at least {10 * LENGTHS[-1]}; steps and repeats must be at least 1"
        )
    config = load(overrides)
    with tempfile.TemporaryDirectory() as folder, one_core():
        rates(written(Path(folder), int(settings.tokens)), settings.repeats)
    share(config, settings.steps)
    return 0


def written(folder: Path, count: int) -> np.ndarray:
    """Write a file of `count` random uint16 tokens. Return it memory-mapped and in the page cache."""
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(VOCABULARY, size=count, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    # The sum reads the whole file into the page cache.
    print(f"{count / 1e6:.0f}M tokens, sum {int(tokens.sum(dtype=np.uint64))}, in the page cache")
    return tokens


def rates(tokens: np.ndarray, repeats: int) -> None:
    """Print the tokens per second of each data mix and sequence length."""
    half = len(tokens) // 2
    mixes = {
        "one data set": {"a": ("a", tokens, 1.0)},
        "a blend of two": {"a": ("a", tokens[:half], 0.7), "b": ("b", tokens[half:], 0.3)},
    }
    rows = []
    for name, sets in mixes.items():
        for length in LENGTHS:
            stream = SampleStream.begin(1234, length, sets)
            micro = max(1, 16 * 256 // length)
            found = sorted(reading(loader(stream, micro), micro * length) for _ in range(repeats))
            rates = [f"{rate / 1e6:.0f}" for rate in (found[0], statistics.median(found), found[-1])]
            rows.append((name, f"{micro} x {length}", *rates))
    print(*table(("million tokens/s, one core", "micro-batch", "minimum", "median", "maximum"), rows), sep="\n")


def loader(stream: SampleStream, micro: int) -> Loader:
    """Return a loader as in a run on one rank, with eight micro-batches per step."""
    return Loader(
        stream,
        HeldOut({}, np.ones(VOCABULARY), {}),
        schedule=BatchSchedule(8 * micro),
        micro_batch_size=micro,
        device=torch.device("cpu"),
    )


def reading(loader: Loader, tokens: int) -> float:
    """Return the tokens per second over about READ tokens, after an untimed step. `tokens`: tokens per micro-batch."""
    with closing(loader):
        size, steps = loader.global_batch_size, max(1, round(READ / (8 * tokens)))

        def read(numbers: range) -> None:
            for number in numbers:
                for micro in range(8):
                    loader.batch(number * size, micro)

        read(range(1))
        return steps * 8 * tokens / seconds(lambda: read(range(1, steps + 1)))


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this process to one core during the block, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def share(config, steps: int) -> None:
    """Print the time of a training step, and the time to read its batches without reading ahead."""
    from gptlite.satellites.parity.record import build

    state, step = build(config, build_mesh(ParallelismConfig()))
    whole = statistics.median(in_turn({"step": lambda: seconds(lambda: step(state))}, steps)["step"])

    def read(position: int) -> None:
        for micro in range(state.loader.micro_batches(position)):
            state.loader.batch(position, micro)

    # The background thread has not read these positions ahead, so each is read synchronously.
    size, first = state.loader.global_batch_size, state.consumed_samples
    positions = [first + (2 * number + 10) * size for number in range(steps)]
    reading = statistics.median(seconds(partial(read, position)) for position in positions)
    state.loader.close()
    print(f"\nstep {1e3 * whole:.1f} ms, reading its batches {1e3 * reading:.3f} ms, {reading / whole:.2%} of the step")


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
