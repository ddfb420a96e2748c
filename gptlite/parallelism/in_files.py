"""Interface of model state that is kept in files, which gptlite.satellites.nvme implements. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError
from gptlite.parallelism.config import Offload, ParallelismConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gptlite.parallelism.mesh import Mesh

PAGE = 4096  # bytes: each parameter's state takes whole pages of a file


class InFiles:
    """Interface of optimizers that keep all or part of their state in files."""

    def settle(self) -> None:
        """Synchronise the files before code other than the step reads or writes the mapped tensors."""
        raise NotImplementedError

    def resident(self) -> list[Tensor]:
        """Return the tensors that take memory: state that is not in files, and buffers."""
        raise NotImplementedError

    def describe(self, weights: str, gradients: str, path: str | None) -> str:
        """Return the place of the model state in words, with the sizes of `weights` and `gradients`."""
        raise NotImplementedError


# Global on purpose: the package that keeps state in files adds itself when it is imported.
KEEP: list[Callable[[Optimizer, ParallelismConfig, Mesh], Optimizer]] = []


def register_state_files(keep: Callable[[Optimizer, ParallelismConfig, Mesh], Optimizer]) -> None:
    """Register the function that returns an optimizer with its state in files, which is an InFiles."""
    KEEP[:] = [keep]


def offload_state(optimizer: Optimizer, config: ParallelismConfig, mesh: Mesh) -> Optimizer:
    """Return the optimizer with its state in files if configured. All ranks call this once.

    Raises ConfigError on all ranks if one of them cannot create its file.
    """
    if config.offload is not Offload.nvme:
        return optimizer
    if not KEEP:
        raise ConfigError("parallelism.offload=nvme: call gptlite.config.plugins.import_included() first")
    return KEEP[0](optimizer, config, mesh)
