"""How the model is cut over devices, and what is recomputed in the backward pass."""

from dataclasses import dataclass
from enum import Enum


class ActivationCheckpointing(Enum):
    """What the backward pass recomputes: nothing, whole blocks, or all but the matmuls and attention.

    `offload` recomputes nothing: what a block saves for the backward pass waits in host memory.
    """

    none = "none"
    full = "full"
    selective = "selective"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """Whether blocks run forward again."""
        return self in (ActivationCheckpointing.full, ActivationCheckpointing.selective)


class Offload(Enum):
    """What a step keeps off its device: nothing; all model state but what computes, in host memory; or that, with the
    optimizer's state in files."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class ParallelismConfig:
    """Degrees of each mesh axis, and how each is run. `data: null` is what is left of the world."""

    auto: bool = False  # the plan chooses: the fastest layout that fits, of what the keys given here leave open
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int | None = None
    dp_replicate: int = 1  # copies of the shards; the other data / dp_replicate ranks shard (HSDP)
    zero: int = 0  # what data ranks shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    offload: Offload = Offload.none  # where parameters, gradients and optimizer state are kept: docs/offload.md
    offload_path: str | None = None  # the folder of offload=nvme, on a disk of each machine's own
    offload_buffer_mib: int = 64  # of each of the two buffers that state passes through on its way to files and back
    sequence: bool = False  # cut the activations between tensor-parallel layers along the sequence
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv
    virtual_stages: int | None = None  # stages a pipeline rank holds; null: 1 for gpipe and 1f1b, else 2
    spread: bool = False  # data: null takes every GPU, or 2 ranks on a CPU, where train.py starts the ranks itself
    bucket_layers: int = 1  # blocks whose parameters are gathered, and gradients reduced, together
    prefetch: int = 1  # buckets gathered ahead
    timeout_seconds: float = 300.0  # a collective that takes longer ends the run
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
