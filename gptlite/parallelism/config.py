"""Configuration of parallelism: degrees, ZeRO, pipeline schedule, offload and activation checkpointing."""

from dataclasses import dataclass
from enum import Enum


class ActivationCheckpointing(Enum):
    """Recomputation in the backward pass: none, whole blocks, or all but the matmuls and attention.

    `offload` recomputes nothing; activations saved for the backward pass are kept in host memory.
    """

    none = "none"
    full = "full"
    selective = "selective"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """True if blocks run forward again."""
        return self in (ActivationCheckpointing.full, ActivationCheckpointing.selective)


class Offload(Enum):
    """Place of the model state: the device (`none`), host memory (`cpu`), or host memory with the optimizer state in
    files (`nvme`)."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class ParallelismConfig:
    """Degree and options of each mesh axis. `data: null` takes the ranks that the other axes leave."""

    auto: bool = False  # the planner sets all keys not given here: the fastest layout that fits
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # data ranks that share the experts of a layer; each keeps its own tokens
    data: int | None = None
    dp_replicate: int = 1  # copies of the shards; the other data / dp_replicate ranks shard (HSDP)
    zero: int = 0  # what data ranks shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    offload: Offload = Offload.none  # where parameters, gradients and optimizer state are kept: docs/offload.md
    offload_path: str | None = None  # folder for offload=nvme, on a local disk of each machine
    offload_buffer_mib: int = 64  # size of each of the two buffers between files and the update
    sequence: bool = False  # cut the activations between tensor-parallel layers along the sequence
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv
    virtual_stages: int | None = None  # stages per pipeline rank; null: 1 for gpipe and 1f1b, else 2
    spread: bool = False  # if train.py starts the ranks, data: null takes every GPU, or 2 ranks on a CPU
    bucket_layers: int = 1  # blocks whose parameters are gathered, and gradients reduced, together
    prefetch: int = 1  # buckets gathered ahead
    timeout_seconds: float = 300.0  # a collective that takes longer ends the run
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
