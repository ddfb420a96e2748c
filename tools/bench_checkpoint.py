"""Benchmark of checkpoints: throughput of saves compared with dd, and the cost of asynchronous saves in training.

python tools/bench_checkpoint.py [megabytes=1000] [steps=100] [repeats=5] [folder=PATH] [any override of train.py]

The first part saves `megabytes` of tensors synchronously, alternating with `dd conv=fsync` of the same bytes. Both
write to a temporary folder in `folder`, by default the working directory. The second part trains the configured run in
intervals of `steps` steps, alternately without a save and with an asynchronous save at the start of the interval.
Results are medians of `repeats` measurements. megabytes=0 skips the first part, and steps=0 the second.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from timing import in_turn, own_arguments, seconds

from gptlite.commands.train import guarded
from gptlite.config import load
from gptlite.errors import ConfigError


@dataclass
class Arguments:
    """Arguments of this tool. Other arguments are overrides of train.py."""

    megabytes: int = 1000
    steps: int = 100
    repeats: int = 5
    folder: str = "."


def main(arguments: list[str]) -> int:
    """Run the measurements and print their results. Raises ConfigError for invalid arguments."""
    options, overrides = own_arguments(Arguments, arguments, __doc__)
    if not Path(options.folder).is_dir():
        raise ConfigError(f"folder={options.folder} is not a folder; give a folder on the disk to measure")
    if options.repeats < 1 or min(options.megabytes, options.steps) < 0:
        raise ConfigError(
            "repeats must be at least 1, and megabytes and steps at least 0, not "
            f"repeats={options.repeats}, megabytes={options.megabytes}, steps={options.steps}"
        )
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
        if options.megabytes:
            against_dd(Path(folder), options.megabytes, options.repeats)
        if options.steps:
            intervals(Path(folder), overrides, options.steps, options.repeats)
    return 0


def against_dd(folder: Path, megabytes: int, repeats: int) -> None:
    """Measure synchronous saves, alternating with dd, and print the throughputs and their ratio."""
    import torch

    from gptlite.checkpoint.checkpointer import Checkpointer
    from gptlite.checkpoint.config import CheckpointConfig

    tensors = {f"w{index}": torch.randn(megabytes * 250_000 // 20) for index in range(20)}
    checkpointer = Checkpointer(CheckpointConfig(keep=0), folder)
    size, saved, target = sum(tensor.nbytes for tensor in tensors.values()), [], folder / "dd"
    # dd copies the same bytes from memory, since a disk may write zeros faster.
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as source:
        for tensor in tensors.values():
            source.write(tensor.numpy().data)
        source.flush()
        command = ["dd", f"if={source.name}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]

        def dd() -> float:
            took = seconds(lambda: subprocess.run(command, check=True))
            target.unlink()
            os.sync()
            return took

        def save() -> float:
            meta: dict[str, Any] = {"step": len(saved) + 1}
            took = seconds(lambda: saved.append(checkpointer.save(tensors, meta, "", None, lambda _: None)))
            shutil.rmtree(saved[-1])
            os.sync()
            return took

        times = in_turn({"dd": dd, "save": save}, repeats, warm_up=1)
    rates = {name: size / median(each) / 1e6 for name, each in times.items()}
    shares = [dd / save for dd, save in zip(*times.values(), strict=True)]
    print(
        f"{size / 1e6:.0f} MB: dd with fsync {rates['dd']:.0f} MB/s, synchronous save {rates['save']:.0f} MB/s, "
        f"{median(shares):.0%} of dd (median of {repeats} pairs: {', '.join(f'{share:.0%}' for share in shares)})",
        flush=True,
    )


def intervals(folder: Path, overrides: list[str], steps: int, repeats: int) -> None:
    """Measure training intervals without and with an asynchronous save, and print the medians."""
    from gptlite.launch.process import keep_freed_memory

    keep_freed_memory()  # before any tensor is created: torch reads its huge page setting only once
    from gptlite.checkpoint.checkpointer import Checkpointer
    from gptlite.checkpoint.config import CheckpointConfig
    from gptlite.config.saved import to_yaml
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.satellites.parity.record import build

    config = load([*overrides, "run.dir=unused", "run.name=bench"])
    mesh = build_mesh(config.parallelism)
    state, take_step = build(config, mesh)
    checkpointer = Checkpointer(CheckpointConfig(async_save=True, keep=1), folder / "run", mesh)
    for _ in range(5):
        take_step(state)
    # `blocked` has the seconds for which each save blocks training.
    blocked, size = [], checkpointer.size(state.tensors(), state.meta(), to_yaml(config), None)

    def save() -> None:
        checkpointer.save(state.tensors(), state.meta(), to_yaml(config), None, lambda _: None)

    def interval(saving: bool) -> float:
        def work() -> None:
            if saving:
                blocked.append(seconds(save))
            for _ in range(steps):
                take_step(state)

        took = seconds(work)
        if saving:
            checkpointer.finish()
        print(f"interval {'with' if saving else 'without'} a save: {took:.3f} s", flush=True)
        return took

    kinds = {"without": lambda: interval(False), "with": lambda: interval(True)}
    times = in_turn(kinds, repeats, warm_up=1)  # the first save allocates the host copy
    checkpointer.close()
    state.loader.close()
    without, block = median(times["without"]), median(blocked[1:])  # without the warm-up
    longer = median(b / a - 1 for a, b in zip(*times.values(), strict=True))
    print(
        f"{size / 1e6:.1f} MB every {steps} steps: an interval takes {without:.2f} s without and "
        f"{median(times['with']):.2f} s with an asynchronous save ({longer:+.2%}); the save blocks for "
        f"{block * 1e3:.1f} ms ({block / without:.2%}), the first one for {blocked[0] * 1e3:.1f} ms; commits within "
        f"{checkpointer.save_seconds:.2f} s (medians of {repeats})"
    )


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
