"""Interface of model state that is kept in files, which gptlite.satellites.nvme implements. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptlite.errors import ConfigError
from gptlite.parallelism.config import Offload, ParallelismConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gptlite.parallelism.mesh import Mesh

PAGE = 4096  # bytes: each parameter's state takes whole pages of a file


class InFiles:
    """Interface of optimizers that keep all or part of the model state in files."""

    def settle(self) -> None:
        """Synchronise the files before code other than the step reads or writes the mapped tensors."""
        raise NotImplementedError

    def resident(self) -> list[Tensor]:
        """Return the tensors that take memory: state that is not in files, and buffers."""
        raise NotImplementedError

    def in_memory(self, tensor: Tensor) -> bool:
        """Return False if a local tensor's memory is a mapped file."""
        return True

    def finish_backward(self) -> None:
        """Bring the gradients up to date, at the end of a step's last backward pass."""

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return `local_grad_norm` of the parameters (gptlite.optimizer.clip)."""
        raise NotImplementedError

    def describe(self, weights: str, gradients: str, path: str | None) -> str:
        """Return the place of the model state in words, with the sizes of `weights` and `gradients`."""
        raise NotImplementedError


@dataclass(frozen=True)
class FileKeeper:
    """Functions that move model state to files.

    `place(parts, config, mesh)` moves the parameters of parts that are on the meta device. `keep(optimizer, config,
    mesh, placed)` returns an optimizer with its state in files, which is an InFiles; `placed` is the result of `place`,
    or None.
    """

    place: Callable[[Sequence[nn.Module], ParallelismConfig, Mesh], object]
    keep: Callable[[Optimizer, ParallelismConfig, Mesh, Any], Optimizer]


# Global on purpose: the package that keeps state in files adds itself when it is imported.
KEEPERS: list[FileKeeper] = []


def register_files(keeper: FileKeeper) -> None:
    """Register the functions that move model state to files."""
    KEEPERS[:] = [keeper]


def place_parameters(parts: Sequence[nn.Module], config: ParallelismConfig, mesh: Mesh) -> object:
    """Move the parameters of parts that are on the meta device to files if configured, else return None.

    All ranks call this once. Raises ConfigError on all ranks if one of them cannot create its file.
    """
    return _keeper().place(parts, config, mesh) if config.offload_parameters else None


def offload_state(optimizer: Optimizer, config: ParallelismConfig, mesh: Mesh, placed: object) -> Optimizer:
    """Return the optimizer with its state in files if configured. `placed`: the result of `place_parameters`.

    All ranks call this once. Raises ConfigError on all ranks if one of them cannot create its file.
    """
    return optimizer if config.offload is not Offload.nvme else _keeper().keep(optimizer, config, mesh, placed)


def settle(optimizer: Optimizer) -> None:
    """Let code other than the step read and write the parameters, gradients and state of an optimizer."""
    if isinstance(optimizer, InFiles):
        optimizer.settle()


def read_once(tensor: Tensor) -> Tensor:
    """Return a copy of a local tensor whose memory is a mapped file, from the file; else the tensor itself."""
    file = getattr(tensor.untyped_storage(), "file", None)  # set by the owner of the mapping
    return tensor if file is None else file.copied(tensor)


def changed(tensor: Tensor) -> None:
    """Write the pages of a changed local tensor whose memory is a mapped file, and drop them from memory."""
    if (file := getattr(tensor.untyped_storage(), "file", None)) is not None:
        file.changed(tensor)


def finish_backward(optimizer: Optimizer) -> None:
    """Bring the gradients up to date, at the end of a step's last backward pass, if they are in files."""
    if isinstance(optimizer, InFiles):
        optimizer.finish_backward()


def _keeper() -> FileKeeper:
    if not KEEPERS:
        raise ConfigError("parallelism.offload=nvme: call gptlite.config.plugins.import_included() first")
    return KEEPERS[0]
