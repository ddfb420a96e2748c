"""Model state of a rank, by category.

Model state is parameters (a rank's shards, and the whole parameters that FSDP2 has gathered), gradients (accumulated in
full, or reduced to shards) and optimizer state. FSDP2 keeps the shards in addition to gathered parameters, even if a
shard is the whole parameter. The table has the bytes per parameter with N data ranks, Adam, and more than one
micro-batch per step.

| stage | bf16     | the paper's | fp32     | the paper's |
|-------|----------|-------------|----------|-------------|
| 0     | 18       | 16          | 20       | 16          |
| 1     | 6 + 12/N | 4 + 12/N    | 8 + 12/N | 8 + 8/N     |
| 2     | 2 + 16/N | 2 + 14/N    | 4 + 16/N | 4 + 12/N    |
| 3     | 16/N     | 16/N        | 16/N     | 16/N        |

These are peaks, reached in the step's last backward pass. The paper is ZeRO, arXiv:1910.02054, section 3, which covers
only 16-bit training; its fp32 column is computed here by the same rules. Without an fp32 copy, bf16 parameters take 2/N
bytes less (2 in stage 0). Without data parallelism, FSDP2 is not used: a parameter takes 16 bytes, or 14 in bf16
without an fp32 copy. Everything else counts as activations here: tensors saved by autograd (on one data rank including
bf16 copies of the weights), temporary buffers of ops and collectives, the block that stage 3 has gathered, and the
gradients of a block before they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.in_files import InFiles

MASTER = 4  # bytes of a master weight or an accumulated gradient: fp32


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's model state at one instant."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return self.parameters + self.gradients + self.optimizer


def paper_bytes_a_parameter(zero: int, shards: int, itemsize: int) -> float:
    """Return the paper's value in the table above. Parameters and gradients have the compute dtype, with `itemsize`
    bytes, and 16-bit parameters also have an fp32 copy."""
    moments = 8 + (MASTER if itemsize < MASTER else 0)
    divided = {0: 0, 1: moments, 2: moments + itemsize, 3: moments + 2 * itemsize}[zero]
    return moments + 2 * itemsize - divided + divided / shards


def shards_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return an optimizer's parameters, which are the shards even while FSDP2 has gathered the parameters."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the local tensors of the optimizer's state. If it is kept in files, return only the tensors in memory."""
    if isinstance(optimizer, InFiles):
        return optimizer.resident()
    values = (value for state in optimizer.state.values() for value in state.values())
    return [part for value in values if isinstance(value, Tensor) for part in _plain(local_tensor(value))]


def in_memory(optimizer: Optimizer, tensors: list[Tensor]) -> list[Tensor]:
    """Return those of an optimizer's local parameters or gradients that are not in files."""
    return [each for each in tensors if optimizer.in_memory(each)] if isinstance(optimizer, InFiles) else tensors


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor subclass, such as 8-bit state."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return `{address: bytes}` of the distinct storages of local tensors. Freed storages are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
