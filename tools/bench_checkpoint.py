"""Time checkpoints on this machine: the disk's rate beside dd's, and what an asynchronous save costs the training.

python tools/bench_checkpoint.py [megabytes=1000] [steps=100] [repeats=5] [folder=PATH] [any override of train.py]

First, `megabytes` of tensors saved synchronously, in turn with `dd conv=fsync` of as many bytes, into the same folder
(a temporary one in the working directory, unless given). Then the configured run, by default the default run: intervals
of `steps` steps without a save and with an asynchronous one at their beginning, in turn. Medians of `repeats`.
megabytes=0 or steps=0 leaves a part out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from gptlite.cli import guarded
from gptlite.config import load
from gptlite.errors import ConfigError

OWN = {"megabytes": 1000, "steps": 100, "repeats": 5}


def main(arguments: list[str]) -> int:
    """Measures and prints. Raises ConfigError for what cannot be measured."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    numbers, overrides, where = dict(OWN), [], "."
    for each in arguments:
        key, _, value = each.partition("=")
        if key in OWN:
            if not value.isdigit():
                raise ConfigError(f"{each}: give a whole number")
            numbers[key] = int(value)
        elif key == "folder":
            where = value
        else:
            overrides.append(each)
    if not Path(where).is_dir():
        raise ConfigError(f"folder={where} is not a folder; give one on the disk to measure")
    if numbers["repeats"] < 1:
        raise ConfigError("repeats=0: at least 1")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=where) as folder:
        if numbers["megabytes"]:
            against_dd(Path(folder), numbers["megabytes"], numbers["repeats"])
        if numbers["steps"]:
            intervals(Path(folder), overrides, numbers["steps"], numbers["repeats"])
    return 0


def against_dd(folder: Path, megabytes: int, repeats: int) -> None:
    """Synchronous saves in turn with dd."""
    import torch

    from gptlite.checkpoint.checkpointer import Checkpointer
    from gptlite.checkpoint.config import CheckpointConfig

    tensors = {f"w{index}": torch.randn(megabytes * 250_000 // 20) for index in range(20)}
    checkpointer = Checkpointer(CheckpointConfig(keep=0), folder)
    size = sum(tensor.nbytes for tensor in tensors.values())
    # The same bytes for dd, out of memory: a disk may be quick with zeros.
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as source:
        for tensor in tensors.values():
            source.write(tensor.numpy().data)
        source.flush()
        seconds: dict[str, list[float]] = {"dd": [], "save": []}
        for step in range(1, repeats + 2):
            target = folder / "dd"
            command = ["dd", f"if={source.name}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
            start = time.perf_counter()
            subprocess.run(command, check=True)
            dd = time.perf_counter() - start
            target.unlink()
            os.sync()
            start = time.perf_counter()
            saved = checkpointer.save(tensors, {"step": step}, "", None, lambda _: None)
            save = time.perf_counter() - start
            shutil.rmtree(saved)
            os.sync()
            if step > 1:
                seconds["dd"].append(dd)
                seconds["save"].append(save)
    rates = {name: size / median(each) / 1e6 for name, each in seconds.items()}
    ratio = median(dd / save for dd, save in zip(seconds["dd"], seconds["save"], strict=True))
    pairs = ", ".join(f"{dd / save:.0%}" for dd, save in zip(*seconds.values(), strict=True))
    print(
        f"{size / 1e6:.0f} MB: dd with fsync {rates['dd']:.0f} MB/s, synchronous save {rates['save']:.0f} MB/s: "
        f"{ratio:.0%} (median of {repeats} pairs: {pairs})",
        flush=True,
    )


def intervals(folder: Path, overrides: list[str], steps: int, repeats: int) -> None:
    """Intervals of training without and with an asynchronous save."""
    from gptlite.launch import keep_freed_memory

    keep_freed_memory()  # first, as where ranks start
    from gptlite.checkpoint.checkpointer import Checkpointer
    from gptlite.checkpoint.config import CheckpointConfig
    from gptlite.config import to_yaml
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.parity.record import build

    config = load([*overrides, "run.dir=unused", "run.name=bench"])
    mesh = build_mesh(config.parallelism)
    state, take_step = build(config, mesh)
    checkpointer = Checkpointer(CheckpointConfig(async_save=True, keep=1), folder / "run", mesh)
    for _ in range(5):
        take_step(state)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    blocked, size = [], checkpointer.size(state.tensors())
    for _ in range(repeats + 1):  # the first one allocates the copy, and is left out
        for saving in (False, True):
            start = time.perf_counter()
            if saving:
                checkpointer.save(state.tensors(), state.meta(), to_yaml(config), None, lambda _: None)
                blocked.append(time.perf_counter() - start)
            for _ in range(steps):
                take_step(state)
            seconds[saving].append(time.perf_counter() - start)
            if saving:
                checkpointer.finish()
            print(f"interval {'with' if saving else 'without'} a save: {seconds[saving][-1]:.3f} s", flush=True)
    checkpointer.close()
    state.loader.close()
    without, with_ = (median(seconds[saving][1:]) for saving in (False, True))
    longer = median(b / a - 1 for a, b in zip(seconds[False][1:], seconds[True][1:], strict=True))
    block = median(blocked[1:])
    print(
        f"{size / 1e6:.1f} MB, every {steps} steps: an interval takes {without:.2f} s without and {with_:.2f} s with "
        f"an asynchronous save ({longer:+.2%}); the save blocks for {block * 1e3:.1f} ms ({block / without:.2%}), the "
        f"first one for {blocked[0] * 1e3:.1f}; commits within {checkpointer.save_seconds:.2f} s (medians of {repeats})"
    )


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
