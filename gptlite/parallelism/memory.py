"""Model state of a rank, by category.

Model state is parameters (a rank's shards, and the whole ones that FSDP2 has gathered), gradients (accumulated in full,
or reduced to shards) and optimizer state. FSDP2 keeps the shards in addition to gathered parameters, even if a shard is
the whole parameter. So with N data ranks, Adam, and more than one micro-batch per step, the bytes per parameter are

| stage | bf16     | the paper's | fp32     | the paper's |
|-------|----------|-------------|----------|-------------|
| 0     | 18       | 16          | 20       | 16          |
| 1     | 6 + 12/N | 4 + 12/N    | 8 + 12/N | 8 + 8/N     |
| 2     | 2 + 16/N | 2 + 14/N    | 4 + 16/N | 4 + 12/N    |
| 3     | 16/N     | 16/N        | 16/N     | 16/N        |

at their peak, which is inside the step's last backward pass (the paper: ZeRO, arXiv:1910.02054, section 3, which has
only bf16; its fp32 column is computed here by the same rules). Parameters without an fp32 copy take 2/N less. Without
data parallelism there is no FSDP2: 16 in both, 14 in bf16 without master weights. Everything else counts as activations
here: tensors saved by autograd (on one data rank including bf16 copies of the weights), temporary buffers of ops and
collectives, the block that stage 3 has gathered, and the gradients of a block before they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from gptlite.parallelism.state_file import InFiles
from gptlite.parallelism.zero import local_tensor

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
    """Return the paper's value in the table above: parameters and gradients in the compute dtype, with an fp32 copy of
    16-bit parameters."""
    moments = 8 + (MASTER if itemsize < MASTER else 0)
    divided = {0: 0, 1: moments, 2: moments + itemsize, 3: moments + 2 * itemsize}[zero]
    return moments + 2 * itemsize - divided + divided / shards


def shards_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return an optimizer's parameters, which are shards even while FSDP2 has gathered them."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the local tensors of the optimizer's state; of state in files, only those in memory."""
    if isinstance(optimizer, InFiles):
        return optimizer.resident()
    values = (value for state in optimizer.state.values() for value in state.values())
    return [part for value in values if isinstance(value, Tensor) for part in _plain(local_tensor(value))]


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor subclass, such as 8-bit state."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return `{address: bytes}` of the distinct storages of local tensors. Freed storages are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
