"""One training step of one rank, with tensors that hold no data and ranks that are imagined.

The model, its layout, the optimizer, the pipeline's schedule and the step are the engine's own. The tensors are on a
"CPU" in any case: torch without CUDA has no autograd for others. For a workload on GPUs, what the engine decides by
the device is decided as there: attention by SDPA's flash kernel, how many logits exist at once, collectives of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.kernels.library import Loaded, load
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes, materialize
from gptlite.ops.config import LOGIT_BYTES, PRODUCTS, SOFTMAX_BYTES, Attention, CrossEntropy
from gptlite.ops.select import Ops
from gptlite.optimizer.config import ConstantConfig
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.chain import Chain
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.memory_watch import state_tensors, where_backward_begins
from gptlite.parallelism.mesh import Mesh, mesh_over_world
from gptlite.parallelism.pipeline import MicroBatches, OnePart, Pipeline
from gptlite.parallelism.point_to_point import PairwiseAllGather, PairwiseReduceScatter
from gptlite.parallelism.torch_private import imagined_world, schedule_stages
from gptlite.parallelism.zero import sharded_modules
from gptlite.plan.simulate_watch import Watch
from gptlite.plan.workload import Workload
from gptlite.precision import Policy, Precision, Reduce
from gptlite.trainer.build import build_parts, build_updates
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What torch's stage calls to learn what it sends and receives around a pass, and which pass that is.
ASKED = {
    "get_fwd_send_ops": "forward",
    "get_fwd_recv_ops": "forward",
    "get_bwd_send_ops": "backward",
    "get_bwd_recv_ops": "backward",
}
PASSES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "backward"}


def watched_step(work: Workload, rank: int, micro_batches: int, ops: Ops, compile: bool) -> Watch:
    """What one step of so many micro-batches does on a rank of the world."""
    with mesh_of(work.layout, rank) as mesh:
        parts = _parts(work, mesh, ops, compile)
        with FakeTensorMode(allow_non_fake_inputs=True), as_on(work.device):
            watch = Watch(mesh, work.device)
            loader = _Loader(work, micro_batches, watch)
            with watch:
                state, passes = _build(work, mesh, parts, loader, ops)
                watch.state = partial(state_tensors, parts, state.optimizer)
                _hook(passes, watch, work.device == "cpu" and mesh.size("dp_shard") > 1)
                state.optimizer.register_step_pre_hook(lambda *_: watch.sample())
                watch.label("batch")
                settings = (work.optimizer.lr, work.optimizer.clip_norm, Stopping(mesh, StopSignal()))
                _Step(mesh, cast(Pipeline, _Passes(passes, watch)), *settings, watch)(state)
                watch.label("end")
    return watch


def ops_of(work: Workload) -> Ops:
    """The ops that a run with that attention takes: references with `matmul`, which is `ops=reference` on a CPU, else
    our kernels."""
    attention = Attention.sdpa if work.attention is Attention.auto else work.attention
    wanted = work.device == "cuda" or attention is not Attention.matmul
    if not wanted:
        return Ops(attention, CrossEntropy.reference)
    if not isinstance(load("cpu", lambda _: None), Loaded):
        return Ops(attention)
    table, gpu = work.device == "cpu", work.device == "cuda"
    plain = dict.fromkeys(("layer_norm", "bias_gelu", "dropout", "adamw"), True)
    return Ops(attention, CrossEntropy.fused, linear=gpu, table=table, fused_scores=gpu, deferred_add=gpu, **plain)


@contextmanager
def mesh_of(layout: Layout, rank: int) -> Iterator[Mesh]:
    """A rank's mesh, in a world that is imagined."""
    if layout.world_size == 1:
        yield Mesh(CPU, layout)
        return
    with imagined_world(rank, layout.world_size):
        yield mesh_over_world(CPU, layout, rank)


@contextmanager
def as_on(device: str, here: str = "cpu") -> Iterator[None]:
    """Sets what ops decide by the kind of device: tensors `here` stand for those of another."""
    limits = cast(tuple[dict[str, Any], ...], (LOGIT_BYTES, SOFTMAX_BYTES, PRODUCTS))
    before = [limit[here] for limit in limits]
    for limit in limits:
        limit[here] = limit[device]
    try:
        yield
    finally:
        for limit, value in zip(limits, before, strict=True):
            limit[here] = value


@contextmanager
def _eager() -> Iterator[None]:
    """Compiling a block does nothing while entered: there is nothing to run it on."""
    compiled = nn.Module.compile
    nn.Module.compile = lambda self, *args, **options: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.compile = compiled  # type: ignore[method-assign]


def _parts(work: Workload, mesh: Mesh, ops: Ops, compile: bool) -> list[nn.Module]:
    """This rank's parts of the model, on the meta device: what is not there yet takes no memory."""
    with _eager():
        # With the device of the workload: it decides by what ZeRO gathers.
        there = replace(mesh, device=torch.device(work.device))
        return build_parts(
            Model.of(work.model, policy_of(work)), work.parallelism, there, policy_of(work), ops, compile=compile
        )


def policy_of(work: Workload) -> Policy:
    """What a run computes, gathers and reduces in."""
    precision = Precision[f"amp_{work.amp}"] if work.amp else Precision.auto
    return Policy(
        DTYPES[work.dtype],
        "planned",
        precision,
        reduce=Reduce.compute if work.half_sums else Reduce.fp32,
        master_weights=work.master_weights,
    )


def _build(
    work: Workload, mesh: Mesh, parts: list[nn.Module], loader: _Loader, ops: Ops
) -> tuple[TrainState, OnePart | Pipeline]:
    """What `pretrain` builds of them, but for the data and the initial weights."""
    model = Model.of(work.model, policy_of(work))
    materialize(model, parts, CPU)
    on_device = replace(work.parallelism, offload=Offload.none)
    optimizer = build_updates(work.optimizer, model, parts, on_device, mesh, policy_of(work), ops)
    optimizer_state(optimizer)  # creates it
    chain = Chain(parts, mesh, work.parallelism)
    passes = build_passes(
        model,
        chain,
        work.parallelism,
        micro_batches=loader.num_micro_batches,
        micro_batch_size=work.micro_batch_size,
        sequence_length=work.sequence_length,
    )
    return TrainState(model, chain, optimizer, Schedule(ConstantConfig(), 1), cast(Loader, loader), {}), passes


class _Loader:
    """As much of a loader as a step asks for. On a CPU a thread of its own makes the batches, which do not count."""

    def __init__(self, work: Workload, micro_batches: int, watch: Watch) -> None:
        shape = (work.micro_batch_size, work.rank_length)
        self.num_micro_batches, self.schedule = micro_batches, BatchSchedule(work.global_batch_size)
        self._copies = work.device != "cpu"
        tensors = [torch.zeros(size, dtype=torch.int64) for size in (shape, shape, shape[:1])]
        watch.leave_out(*tensors)
        self._batch = Batch(tensors[0], tensors[1], tensors[2])

    def micro_batches(self, consumed_samples: int) -> int:
        """As many in every step."""
        return self.num_micro_batches

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """A micro-batch: on a GPU a copy."""
        if not self._copies:
            return self._batch
        return Batch(self._batch.tokens.clone(), self._batch.targets.clone(), self._batch.sample_ids.clone())


@dataclass(frozen=True)
class _Step(Step):
    watch: Watch

    def _settle(self, state: TrainState, total: Tensor) -> tuple[Tensor, Tensor]:
        self.watch.label("update")
        with self.watch.all_ranks():
            return super()._settle(state, total)


class _Passes:
    """The passes of a step, watched. What is sent after them is of the step."""

    def __init__(self, passes: OnePart | Pipeline, watch: Watch) -> None:
        self._passes, self._watch = passes, watch

    def run(self, batches: MicroBatches, valid: Tensor) -> Tensor:
        with self._watch.during("forward"):
            total = self._passes.run(batches, valid)
        self._watch.label("reduce")
        return total


def _hook(passes: OnePart | Pipeline, watch: Watch, pairwise: bool) -> None:
    """Has the passes of a step tell the watch where they are, and what they send."""
    if isinstance(passes, OnePart):
        parts = [passes.part]
        _Alternating(passes.part, watch)
    else:
        stages: list[Any] = schedule_stages(passes.schedule)
        parts = [stage._part for stage in stages]
        for stage in stages:
            _hook_stage(stage, watch)
    for part in parts:
        part.register_forward_hook(_sampled(watch))
        for module in sharded_modules(part) if pairwise else ():
            module.set_custom_all_gather(_Whole(PairwiseAllGather(), "all_gather", watch))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_Whole(PairwiseReduceScatter(), "reduce_scatter", watch))  # type: ignore[arg-type]


class _Whole:
    """A collective of FSDP2 made of messages between pairs of ranks, counted as what it does."""

    def __init__(self, collective: PairwiseAllGather | PairwiseReduceScatter, kind: str, watch: Watch) -> None:
        self.allocate, self._call = collective.allocate, watch.whole(kind, collective)

    def __call__(self, **given: Any) -> None:
        self._call(**given)


def _hook_stage(stage: Any, watch: Watch) -> None:
    for name, phase in PASSES.items():
        setattr(stage, name, _pass(getattr(stage, name), phase, stage.stage_index, watch))
    for name, phase in ASKED.items():
        setattr(stage, name, _asking(getattr(stage, name), phase, watch))


def _pass(run: Callable[..., Any], phase: str, stage: int, watch: Watch) -> Callable[..., Any]:
    def watched(chunk: int, *args: Any, **options: Any) -> Any:
        split = options.get("full_backward") is False
        kind = "F" if phase == "forward" else "W" if "weight" in run.__name__ else "I" if split else "B"
        if kind == "W":
            watch.sample()
        with watch.during(phase, f"{kind} {stage} {chunk}"):
            return run(chunk, *args, **options)

    return watched


def _asking(ask: Callable[[int], list[dist.P2POp]], phase: str, watch: Watch) -> Callable[[int], list[dist.P2POp]]:
    def watched(chunk: int) -> list[dist.P2POp]:
        ops = ask(chunk)
        with watch.during(phase):
            for op in ops:
                watch.count("pp", "send" if op.op is dist.isend else "recv", 2, op.tensor.nbytes)
        return ops

    return watched


class _Alternating:
    """Hooks of a part that runs forward and backward in turn."""

    def __init__(self, part: nn.Module, watch: Watch) -> None:
        self.watch, self.count = watch, 0
        part.register_forward_pre_hook(self._forward, prepend=True)
        part.register_forward_hook(self._ran, prepend=True)

    def _forward(self, part: nn.Module, inputs: object) -> None:
        self.watch.phase = "forward"
        self.watch.label(f"F 0 {self.count}")

    def _ran(self, part: nn.Module, inputs: object, out: Tensor) -> None:
        out.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self.watch.phase = "backward"
        self.watch.label(f"B 0 {self.count}")
        self.count += 1


def _sampled(watch: Watch) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that samples where a backward pass begins from a part's output, as the real watch does: the
    gradients of earlier ones are there, and what it needs is gathered."""

    def hook(part: nn.Module, inputs: object, out: Tensor) -> None:
        where_backward_begins(out, watch.sample)

    return hook
