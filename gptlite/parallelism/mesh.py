"""The mesh of devices a run is cut over. Everything that talks to other ranks is handed this object."""

from dataclasses import dataclass

import torch

from gptlite.parallelism.config import ParallelismConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The degrees of the five axes, slowest first, and this rank's place on them.

    With one rank there is nothing to communicate, so no process group exists.
    """

    device: torch.device
    sizes: tuple[int, ...] = (1, 1, 1, 1, 1)  # in the order of AXES
    rank: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the axes."""
        return torch.Size(self.sizes).numel()

    def size(self, axis: str) -> int:
        """Degree of one axis, by its name in AXES."""
        return self.sizes[AXES.index(axis)]

    def coordinate(self, axis: str) -> int:
        """This rank's index along an axis."""
        index = AXES.index(axis)
        inner = torch.Size(self.sizes[index + 1 :]).numel()
        return self.rank // inner % self.sizes[index]

    @property
    def data_size(self) -> int:
        """Number of data-parallel parts of a global batch: dp_replicate * dp_shard."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads."""
        return self.coordinate("dp_replicate") * self.size("dp_shard") + self.coordinate("dp_shard")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and keeps the terminal."""
        return self.rank == 0


def build_mesh(config: ParallelismConfig) -> Mesh:
    """The mesh of one device: a GPU if there is one, else the CPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    replicate = config.dp_replicate
    shard = (config.data or 1) // replicate
    return Mesh(device, sizes=(config.pipeline, replicate, shard, config.context, config.tensor))
