"""Configuration of parallelism: degrees, ZeRO, pipeline schedule, offload and activation checkpointing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

# Modules whose `build_reduction(config, mesh)` returns what replaces FSDP2's sums of gradients, or None (reduction.py),
# and whether a configuration asks for them. The last one that returns something counts. A plug-in adds its module.
REDUCTIONS: list[tuple[str, Callable[..., bool]]] = []
ACTIVATION_OFFLOADS: list[str] = []  # modules with `offload_activations(blocks)`; the last counts


class Compression(Enum):
    """Codec of the gradients that data ranks send."""

    none = "none"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    powersgd = "powersgd"


class ActivationCheckpointing(Enum):
    """Recomputation in the backward pass: nothing (`none`), whole blocks (`full`), or everything except matmuls and
    attention (`selective`).

    `offload` recomputes nothing, and keeps the activations saved for the backward pass in host memory.
    """

    none = "none"
    full = "full"
    selective = "selective"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes activations."""
        return self in (ActivationCheckpointing.full, ActivationCheckpointing.selective)


class Offload(Enum):
    """Place of the model state: the device (`none`), host memory (`cpu`), or host memory with the optimizer state in
    files (`nvme`). With `offload_parameters`, `nvme` keeps all of it in files."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class ZeroppConfig:
    """ZeRO++, for zero=3: docs/zeropp.md."""

    weights: Compression = Compression.none  # codec of the parameters that data ranks gather
    secondary: bool = False  # keep a copy of the parameters in each node, for the backward pass to gather there
    gradients: Compression = Compression.none  # codec of the gradients that data ranks send, inside nodes first
    node_size: int | None = None  # number of data ranks of a node; null: those of a machine


@dataclass
class ParallelismConfig:
    """Degree and options of each parallelism axis. `data: null` is the world size / (tensor x pipeline x context)."""

    auto: bool = False  # the planner chooses the fastest layout that fits, by setting all keys not given here
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # number of data ranks, with different samples, that the experts of a layer are divided among
    data: int | None = None  # null: the ranks that other degrees leave; elastic: elastic=true
    elastic: bool = False  # data=elastic: the largest degree that the ranks at hand allow: docs/elastic.md
    dp_replicate: int = 1  # number of replicas of the model state, each sharded over data / dp_replicate ranks (HSDP)
    zero: int = 0  # ZeRO stage: data ranks shard optimizer state (1), also gradients (2), also parameters (3)
    offload: Offload = Offload.none  # place of parameters, gradients and optimizer state: docs/offload.md
    offload_path: str | None = None  # folder for offload=nvme, on a local disk of each machine
    offload_parameters: bool = False  # offload=nvme with zero=3 keeps parameters and gradients in files as well
    offload_buffer_mib: int = 64  # size of each of the two buffers between files and the update
    sequence: bool = False  # shard the activations between tensor-parallel layers along the sequence
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv
    virtual_stages: int | None = None  # stages per pipeline rank; null: 1 for gpipe and 1f1b, otherwise 2
    spread: bool = False  # if train.py starts the ranks, data: null uses every GPU, or data=2 on a CPU
    bucket_layers: int = 1  # number of blocks whose parameters are gathered, and gradients reduced, together
    compression: Compression = Compression.none  # bytes of gradients between data ranks: docs/compressed.md
    compression_rank: int = 4  # rank of the matrices of compression=powersgd
    zeropp: ZeroppConfig = field(default_factory=ZeroppConfig)
    deterministic: bool = False  # fp32 results with equal bits on all data-parallel layouts: docs/deterministic.md
    prefetch: int = 1  # number of buckets whose parameters ZeRO 3 gathers ahead of their use
    timeout_seconds: float = 300.0  # a collective that takes longer ends the run
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
