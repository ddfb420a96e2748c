"""Input and output types of the planner: a workload (model, layout and batch of a run), its memory, traffic and
time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

from gptlite.models.capabilities import PlainModule, required
from gptlite.models.config import ModelConfig
from gptlite.models.registry import spec_of
from gptlite.ops.config import Attention
from gptlite.optimizer.config import OptimizerConfig
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import Layout, accumulation
from gptlite.satellites.plan.cache import cached, same_model

MASTER = 4  # bytes of an fp32 number
INSIDE, ACROSS = "dp_inside", "dp_across"  # along dp_shard: ranks of a node of ZeRO++, and those at one place in all
INDEX = 8  # bytes of a token id, int64
# Ratio of the rows of a rank's experts to the mean of all ranks: early in training (for memory), and after the loads
# have settled (for time). Measured in the first 400 steps of moe-lite, as the 95th percentile over layers and steps:
# 1.2 with two ranks, 1.6 with four, 2.2 with eight ranks of one expert each; at the end of these steps 1.03 to 1.1
# (docs/moe.md).
FULLEST, SETTLED = 1.5, 1.1


@cache
def frees_messages() -> bool:
    """Return True if the installed torch frees a pipeline's messages during the step, and the buffers of reductions at
    the end of a split backward pass: 2.15 and later."""
    return tuple(map(int, version("torch").split(".")[:2])) >= (2, 15)


@dataclass(frozen=True)
class Sample:
    """Input and target of one sample, as batches of one on the meta device, and their bytes. `words` describes them,
    to compare samples of different shapes."""

    x: Any = field(compare=False)
    target: Any = field(compare=False)
    x_bytes: int
    target_bytes: int
    words: str


@dataclass(frozen=True)
class Workload:
    """Model, layout and batch of a training step, from which memory, traffic and time are predicted.

    The vocabulary size in `model` is set. Batch sizes are in sequences, or in samples, which have one position. dtype:
    the compute dtype, fp32, bf16 or fp16. attention: the implementation that a run's `ops` would select. device: cuda
    or cpu. master_weights: parameters are fp32 between steps, not bf16. amp: Apex's level o1 or o2, or empty.
    half_sums: gradients are summed over data ranks in the compute dtype, not in fp32. fp8: blocks multiply in fp8.
    flat: the parameters of a group are views of one tensor, so that gathers need no copies; in FSDP1, not in gptlite.
    sample: None for a model that reads tokens. imbalance: with expert parallelism, the ratio of the rows of a rank's
    experts to the mean. steps: length of the run, which matters to 1-bit optimizers; exchanging: the step is one in
    which they exchange momenta, or with `alone` one between two exchanges. node_ranks: ranks of a machine; 0 for all.
    """

    model: ModelConfig
    parallelism: ParallelismConfig
    layout: Layout
    optimizer: OptimizerConfig
    global_batch_size: int
    micro_batch_size: int
    sequence_length: int
    dtype: str
    attention: Attention
    device: str = "cuda"
    master_weights: bool = True
    amp: str = ""
    half_sums: bool = False
    fp8: bool = False
    flat: bool = False
    sample: Sample | None = None
    imbalance: float = FULLEST
    steps: int = 1
    exchanging: bool = False
    alone: bool = False
    node_ranks: int = 0

    @cached_property
    def same(self) -> tuple[object, ...]:
        """Fields that all layouts of a search share, as part of a cache key."""
        numbers = self.dtype, self.attention, self.device, self.master_weights, self.amp, self.fp8, self.imbalance
        return *same_model(self.model), self.sequence_length, self.sample, *numbers

    def balanced(self, imbalance: float) -> Workload:
        """Return the workload with another imbalance, if its layout has an expert axis."""
        return self if self.layout.size(EXPERT) == 1 else replace(self, imbalance=imbalance)

    @property
    def stored(self) -> int:
        """Bytes of a parameter element between steps."""
        return 4 if self.master_weights else 2

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.dtype == "fp32" else 2

    @cached_property
    def gather_item(self) -> int:
        """Bytes of a parameter element that FSDP2 gathers.

        Apex's levels keep some parameters in fp32. Under autocast, matrix products cast their operands, so parameters
        are gathered in the dtype in which they are stored.
        """
        if not spec_of(self.model).casts and self.dtype != "fp32":
            return self.stored
        return 4 if self.amp else self.itemsize

    @property
    def reduce_item(self) -> int:
        """Bytes of a gradient element that FSDP2 reduces."""
        return self.itemsize if self.half_sums else 4

    @property
    def stream_item(self) -> int:
        """Bytes of an activation element between layers."""
        return 4 if self.amp == "o1" else self.itemsize

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step of each data-parallel rank."""
        return accumulation(self.global_batch_size, self.micro_batch_size, self.layout.data_size)

    @property
    def rank_length(self) -> int:
        """Positions of each sequence on a rank; context-parallel ranks divide the sequences."""
        return self.sequence_length // self.layout.context

    @property
    def rank_tokens(self) -> int:
        """Tokens per micro-batch on one rank."""
        return self.micro_batch_size * self.rank_length

    @property
    def input_bytes(self) -> int:
        """Bytes of a micro-batch's input on one rank."""
        return self.micro_batch_size * self.sample.x_bytes if self.sample else self.rank_tokens * INDEX

    @property
    def target_bytes(self) -> int:
        """Bytes of a micro-batch's targets on one rank."""
        return self.micro_batch_size * self.sample.target_bytes if self.sample else self.rank_tokens * INDEX

    @cached_property
    def sharded(self) -> bool:
        """True if FSDP2 manages the parameters: with several data or context ranks, or with offload."""
        return self.layout.fsdp_size > 1 or self.parallelism.offload is not Offload.none

    @property
    def in_files(self) -> bool:
        """True if parameters and gradients are in files between uses, as well as the optimizer state."""
        return self.parallelism.offload_parameters and self.parallelism.offload is Offload.nvme

    @property
    def on_host(self) -> bool:
        """True if tensors are offloaded to memory other than the device's."""
        return self.parallelism.offload is not Offload.none and self.device != "cpu"

    @property
    def unit(self) -> str:
        """Unit of throughput: tokens or samples."""
        return "samples" if self.sample else "tokens"

    @property
    def tokens(self) -> int:
        """Tokens or samples of a step, over all ranks."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class RankBytes:
    """Peak bytes on one rank's device during a step, by category. `host`: bytes offloaded to the host's memory, which
    are not part of the total. `compression`: what compressed communication keeps between steps, such as errors."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    compression: int = 0

    @property
    def total(self) -> int:
        """Sum of the categories on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.compression


# Number of times that a ring algorithm sends (n-1)/n of a collective's tensor.
TURNS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class Transfer(NamedTuple):
    """A collective or message of a rank, repeated `count` times per step.

    axis: tp, cp, pp, dp_shard, dp_replicate, world, INSIDE or ACROSS. kind: all_reduce, all_gather, reduce_scatter,
    all_to_all, send, recv or broadcast. payload: bytes of the whole tensor before a reduction or after a gather, of
    this rank's parts for all ranks (all_to_all), or of the message; a float in a profile, where sizes are extrapolated.
    phase: forward, backward or step, on which the overlap with compute depends.
    """

    axis: str
    kind: str
    ranks: int
    payload: float
    count: int
    phase: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends in all `count` repetitions, by a ring algorithm or pairwise.

        Each repetition sends 2 (n-1)/n of the tensor in an all-reduce, (n-1)/n in others, or the whole message.
        """
        share = TURNS.get(self.kind, 0)
        each = self.payload if not share else share * (self.ranks - 1) * self.payload // self.ranks
        return 0 if self.kind == "recv" else each * self.count


@dataclass(frozen=True)
class Prediction:
    """A predicted step, in seconds of the slowest rank.

    `bubble_seconds` is idle time in the pipeline, `communication_seconds` the communication that does not overlap with
    compute. `memory` is that of the fullest rank, `memory_rank` its pipeline rank.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    tokens_per_second: float
    mfu: float
    memory: RankBytes
    memory_rank: int


def block_input(work: Workload, block: int) -> tuple[int, ...]:
    """Return the shape of a micro-batch's activations at the input of a block."""
    slices = work.layout.size("tp") if work.parallelism.sequence else 1
    size, length = work.micro_batch_size, work.rank_length // slices
    return spec_of(work.model).activations(work.model, size, length) or _inputs(work)[block]


@cached(lambda work: (work.same, work.micro_batch_size))
def _inputs(work: Workload) -> list[tuple[int, ...]]:
    """Return the shape of each block's input, for a model whose blocks differ."""
    import torch

    shape, dtype = (work.rank_length,), torch.int64
    if work.sample:
        shape, dtype = work.sample.x.shape[1:], work.sample.x.dtype
    x = torch.empty((work.micro_batch_size, *shape), dtype=dtype, device="meta")
    return required(spec_of(work.model), PlainModule, "parallelism.pipeline").input_shapes(work.model, x)
