"""Check of free disk space for `parallelism.offload=nvme`, before the ranks start."""

import shutil
from pathlib import Path

from gptlite.config import Config, with_vocabulary
from gptlite.errors import ConfigError
from gptlite.files import unwritable
from gptlite.ops.config import Attention
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import Layout
from gptlite.plan.traffic import file_bytes
from gptlite.plan.workload import Workload


def check_offload_space(config: Config, layout: Layout, here: int) -> None:
    """Raise ConfigError if the folder `offload_path` cannot hold the optimizer state of the `here` local ranks."""
    if config.parallelism.offload is not Offload.nvme:
        return
    key, folder = f"parallelism.offload_path={config.parallelism.offload_path}", config.parallelism.offload_path or ""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{key} is not a folder; create it on a local disk, or give another folder")
    if reason := unwritable(path, "parallelism.offload_path"):
        raise ConfigError(f"{key}: {reason}")
    needed, free = needed_bytes(config, layout, here), shutil.disk_usage(path).free
    if needed > free:
        raise ConfigError(
            f"{key}: the optimizer state of {here} rank{'s' * (here > 1)} takes {needed / 1e6:.1f} MB, but "
            f"only {free / 1e6:.1f} MB are free; free some, or give another folder"
        )


def needed_bytes(config: Config, layout: Layout, here: int) -> int:
    """Return the total file size of the first `here` ranks in bytes; a lower bound while the vocabulary is unknown."""
    work = Workload(
        model=with_vocabulary(config, 1).model,
        parallelism=config.parallelism,
        layout=layout,
        optimizer=config.optimizer,
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=1,  # this and the following arguments do not affect the files
        sequence_length=config.data.sequence_length,
        dtype="fp32",
        attention=Attention.matmul,
    )
    places = [(layout.coordinate(rank, "pp"), layout.coordinate(rank, "tp")) for rank in range(here)]
    # Data-parallel ranks at the same place have shards of equal size.
    bytes_of = {place: file_bytes(work, *place) for place in set(places)}
    return sum(bytes_of[place] for place in places)
