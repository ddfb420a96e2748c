"""Checks that a run fits the memory and the disk of this machine, before the ranks start."""

import math
import os
import shutil
from pathlib import Path

from gptlite.config.schema import Config
from gptlite.cpu import memory_bytes
from gptlite.errors import ConfigError
from gptlite.files import unwritable
from gptlite.invocation import command
from gptlite.launch.host_memory import GIB
from gptlite.models.registry import spec_of
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import Offload
from gptlite.parallelism.in_files import PAGE
from gptlite.parallelism.layout import Layout

FP32 = 4  # bytes


def check_memory(config: Config, layout: Layout, here: int) -> None:
    """Raise ConfigError if parameters and optimizer state alone exceed the memory of a machine with `here` CPU ranks.

    Otherwise the operating system would end the run, or other programs, after minutes of allocation.
    """
    in_memory = 1 if config.parallelism.offload is Offload.nvme else 1 + config.optimizer.moments
    in_memory *= not config.parallelism.offload_parameters
    elements = sum(shards(config, layout)) / layout.size("pp")
    state = here * in_memory * FP32 * elements / GIB
    if state > (memory := memory_bytes() / GIB):
        raise ConfigError(
            f"{spec_of(config.model).label(config.model)} needs {state:,.1f} GiB for parameters and optimizer state on "
            f"this machine, which has {memory:,.1f} GiB of memory; choose a smaller model, or plan a cluster for it: "
            f"{command('plan')} --help"
        )


def check_disk(config: Config, layout: Layout, here: int) -> None:
    """Raise ConfigError if the folder `offload_path` cannot hold the state of the `here` local ranks, or is itself in
    memory."""
    if config.parallelism.offload is not Offload.nvme:
        return
    key, folder = f"parallelism.offload_path={config.parallelism.offload_path}", config.parallelism.offload_path or ""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{key} is not a folder; create it on a local disk, or give another folder")
    if reason := unwritable(path, "parallelism.offload_path"):
        raise ConfigError(f"{key}: {reason}")
    needed, free = state_file_bytes(config, layout, here), shutil.disk_usage(path).free
    if needed > free:
        state = "model and optimizer state" if config.parallelism.offload_parameters else "optimizer state"
        raise ConfigError(
            f"{key}: the {state} of {here} rank{'s' if here > 1 else ''} takes {needed / 1e6:.1f} MB, but "
            f"only {free / 1e6:.1f} MB are free; free some, or give another folder"
        )
    if _in_memory(path):
        raise ConfigError(f"{key} is on tmpfs, which keeps files in memory; give a folder on a disk, or use "
                          "parallelism.offload=cpu")  # fmt: skip


def _in_memory(folder: Path) -> bool:
    """Return True if a folder is on tmpfs. Other systems than Linux have no list of mounts there."""
    device, mounts = folder.stat().st_dev, Path("/proc/self/mountinfo")
    number = f" {os.major(device)}:{os.minor(device)} "
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    return any(number in line and " - tmpfs " in line for line in lines)


def state_file_bytes(config: Config, layout: Layout, here: int) -> int:
    """Return the bytes of the files with the state of `here` ranks, if all ranks' files are equal. A file has each
    parameter's state in whole pages."""
    rows = config.optimizer.state_elements() + 2 * config.parallelism.offload_parameters  # parameters and gradients
    pages = sum(math.ceil(FP32 * shard / PAGE) for shard in shards(config, layout))
    return math.ceil(here * rows * PAGE * pages / layout.size("pp"))


def shards(config: Config, layout: Layout) -> list[float]:
    """Return the elements of each of the model's parameters on a rank that has it; [] if the model cannot be built,
    which the run reports.

    The vocabulary size must be set. Without ZeRO, the data ranks of an expert group have different experts.
    """
    from gptlite.models.model import Model
    from gptlite.ops.select import Ops
    from gptlite.parallelism.expert import ExpertWeights

    try:
        whole = Model.of(config.model).build(Ops(), 0)
    except Exception:  # a user's model may raise anything
        return []
    experts = {id(p) for module in whole.modules() if isinstance(module, ExpertWeights) for p in module.parameters()}
    among = layout.size(EXPERT) if layout.size("dp_shard") == 1 else 1
    ranks = layout.size("tp", "dp_shard")
    return [p.numel() / ranks / (among if id(p) in experts else 1) for p in whole.parameters()]
