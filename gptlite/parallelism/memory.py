"""Predicted memory of a rank's part of the model during training.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import stages_per_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.state_file import InFiles
from gptlite.parallelism.tensor import of_experts
from gptlite.parallelism.zero import local_tensor, sharded_modules

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


def predicted_state(
    parts: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh, zero: int, itemsize: int, micro_batches: int
) -> StateBytes:
    """Return the model state at its peak. `itemsize` is that of the compute dtype; the optimizer's state must exist."""
    modules: list[nn.Module] = [m for part in parts for m in sharded_modules(part) if m is not part]  # type: ignore[misc]
    blocks = {id(p) for module in modules for p in module.parameters()}
    engine = any(sharded_modules(part) for part in parts)
    # ZeRO 3 frees the gathered parameters of blocks; all others stay gathered through the step.
    copied = [p for p in shards_of(optimizer) if engine and (zero < 3 or id(p) not in blocks)]
    shards, whole = MASTER * _elements(shards_of(optimizer)), MASTER * whole_elements(optimizer, mesh)
    mine = sum(storage_sizes(map(local_tensor, shards_of(optimizer))).values())
    gathered = itemsize * _whole_elements(copied, mesh)
    accumulated = 0 if micro_batches == 1 else whole if zero < 2 else shards  # one micro-batch has none to accumulate
    moments = sum(storage_sizes(state_of(optimizer)).values())
    in_backward = StateBytes(mine + gathered, accumulated, moments)
    return max(in_backward, StateBytes(mine, shards, moments), key=lambda state: state.total)


def whole_elements(optimizer: Optimizer, mesh: Mesh) -> int:
    """Return the number of parameters in this rank's parts before ZeRO shards them, including the padding to equal
    shards."""
    return _whole_elements(shards_of(optimizer), mesh)


def _whole_elements(shards: Iterable[Tensor], mesh: Mesh) -> int:
    """Return the elements of parameters before ZeRO shards them. Fewer ranks shard a rank's experts."""
    ranks = {False: mesh.size("dp_shard"), True: mesh.layout.expert_sizes[2]}
    return sum(_elements([shard]) * ranks[of_experts(shard)] for shard in shards)


def paper_bytes_a_parameter(zero: int, shards: int, itemsize: int) -> float:
    """Return the paper's value in the table above: parameters and gradients in the compute dtype, with an fp32 copy of
    16-bit parameters."""
    moments = 8 + (MASTER if itemsize < MASTER else 0)
    divided = {0: 0, 1: moments, 2: moments + itemsize, 3: moments + 2 * itemsize}[zero]
    return moments + 2 * itemsize - divided + divided / shards


def micro_batches_in_flight(config: ParallelismConfig, pp_rank: int, micro_batches: int) -> float:
    """Return the number of micro-batches whose activations a rank holds at once, averaged over its stages."""
    ranks = config.pipeline
    if ranks == 1:
        return 1
    if config.schedule == "gpipe":
        return micro_batches
    if config.schedule == "1f1b":
        return min(ranks - pp_rank, micro_batches)
    stages = stages_per_rank(config)
    # Forward passes of single stages before the first backward pass (Narayanan et al. 2021, arXiv:2104.04473); in a V
    # as many as 1F1B's first rank has (Qi et al. 2024, arXiv:2405.15362).
    started = 2 * ranks if config.schedule == "zbv" else 2 * (ranks - pp_rank - 1) + (stages - 1) * ranks + 1
    return min(started / stages, micro_batches)


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


def _elements(shards: Iterable[Tensor]) -> int:
    # The storage, as FSDP2 pads shards to equal size.
    return sum(local_tensor(shard).untyped_storage().nbytes() // shard.itemsize for shard in shards)
