"""Simulation of one rank of a world of any size on a CPU: memory, communication and FLOPs of a step.

The engine's own model, layout, optimizer, schedule and step run with fake tensors and simulated ranks, so they behave
as on a real rank. With many micro-batches only the first ones are run, and the rest is extrapolated: see `simulate`.

The fake tensors are always on the CPU, as torch without CUDA has no autograd for other devices. For a workload on GPUs
the engine still chooses as on a GPU: SDPA's flash kernel, the number of logits at a time, FSDP2's collectives.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.kernels.library import LoadedLibrary, load
from gptlite.models.experts import Experts
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes, materialize
from gptlite.ops.config import LOGIT_BYTES, PRODUCTS, SOFTMAX_BYTES, Attention, CrossEntropy
from gptlite.ops.select import PLAIN, Ops
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.schedule_config import ConstantConfig
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.layout import Layout, rule
from gptlite.parallelism.mesh import Mesh, mesh_over_world
from gptlite.parallelism.pipeline import OnePart
from gptlite.parallelism.point_to_point import PairwiseAllGather, PairwiseReduceScatter
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.parallelism.zero import sharded_modules
from gptlite.precision import Policy, Precision, Reduce
from gptlite.satellites.monitor.memory_watch import state_tensors, where_backward_begins
from gptlite.satellites.plan.segments import Op
from gptlite.satellites.plan.watch import Change, OpRecorder
from gptlite.satellites.plan.workload import RankBytes, Transfer, Workload
from gptlite.satellites.samples.batch import SampleBatch
from gptlite.torch_private.ops import tree_leaves, tree_map
from gptlite.torch_private.recording import FakeTensorMode
from gptlite.torch_private.simulation import imagined_world, schedule_stages
from gptlite.trainer.parts import build_parts, build_updates
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

State = dict[str, dict[int, int]]  # bytes of model state, by category and by storage number
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Methods of torch's pipeline stage that return the messages around a pass, and the phase of that pass.
MESSAGE_METHODS = {
    "get_fwd_send_ops": "forward",
    "get_fwd_recv_ops": "forward",
    "get_bwd_send_ops": "backward",
    "get_bwd_recv_ops": "backward",
}


@dataclass(frozen=True)
class Simulation:
    """Simulated step of one rank. `peak` has the model state at its peak, and the peak of activations (all other
    memory); the two peaks may occur at different times."""

    peak: RankBytes
    transfers: list[Transfer]
    flops: int

    @classmethod
    def of(cls, counts: Counter[str | Transfer]) -> Simulation:
        """Return the simulation from the number of each transfer, the FLOPs, and the bytes of each category."""
        sizes = {key: size for key, size in counts.items() if isinstance(key, str)}
        sent = sorted((key, count) for key, count in counts.items() if isinstance(key, Transfer))
        flops = sizes.pop("flops")
        return cls(RankBytes(**sizes), [each._replace(count=count) for each, count in sent], flops)


def simulate(work: Workload, rank: int) -> Simulation:
    """Simulate a step of one rank of the workload's world. Call it in a process without a process group.

    If the step has more micro-batches than `enough` returns, two smaller steps are simulated, and their difference is
    added for each further micro-batch. This is exact: once a pipeline is full, each further micro-batch adds the same
    transfers, FLOPs and bytes (of its activations in GPipe, of its receive buffers in any schedule). Raises ValueError
    for a rank outside the world.
    """
    if not 0 <= rank < work.layout.world_size:
        raise ValueError(f"rank {rank} is outside the world; the last rank is {work.layout.world_size - 1}")
    few, more = enough(work)
    if more >= work.micro_batches:
        return Simulation.of(counted(work, rank, work.micro_batches))
    before, after = counted(work, rank, few), counted(work, rank, more)
    left = work.micro_batches - more
    further = {key: count + (count - before[key]) * left // (more - few) for key, count in after.items()}
    return Simulation.of(Counter(further))


def enough(work: Workload) -> tuple[int, int]:
    """Return two numbers of micro-batches, from which `simulate` can extrapolate the counts of a longer step."""
    config, count = work.parallelism, work.micro_batches
    if config.pipeline == 1:
        return 2, 3
    if not rule(config).even_rounds:  # a V-shaped pipeline is full at two micro-batches per rank
        full = 2 * config.pipeline if rule(config).v_shape else config.pipeline
        return full + 1, full + 2
    # Interleaved schedules run in rounds. If the two numbers do not give rounds of the same size, simulate all.
    rounds = max(1, count // config.pipeline)
    each = count // rounds
    few, more = 2 * each, 3 * each
    same = all(number // max(1, number // config.pipeline) == each for number in (few, more))
    return (few, more) if same else (count, count)


def counted(work: Workload, rank: int, micro_batches: int) -> Counter[str | Transfer]:
    """Return the counts of a step with that many micro-batches, as for `Simulation.of`."""
    watch = watched_step(work, rank, micro_batches)
    found = Counter[str | Transfer](each for each in watch.log if isinstance(each, Transfer))
    found["flops"] = sum(int(each.flops) for each in watch.log if isinstance(each, Op))
    found.update(peak(watch.log, watch.begin, watch.samples))
    return found


def peak(log: Sequence[Change | Op | Transfer], begin: int, samples: Sequence[State]) -> dict[str, int]:
    """Return bytes by category: model state in the sample where it peaks, and the peak of all other memory.

    The peak of other memory is that from index `begin` of the log. The definitions are those of
    `monitor.memory_watch`. A storage that is model state in any sample counts as model state from its allocation to
    its release. Raises ValueError without samples.
    """
    state = {number for sample in samples for sizes in sample.values() for number in sizes}
    sizes = (each.size if isinstance(each, Change) and each.number not in state else 0 for each in log)
    beside = islice(accumulate(sizes, initial=0), begin, None)
    sums = ({name: sum(sizes.values()) for name, sizes in sample.items()} for sample in samples)
    return {**max(sums, key=lambda sample: sum(sample.values())), "activations": max(beside)}


class StepWatch(OpRecorder):
    """A watch of one step. The log before index `begin` is that of the setup. `samples`: bytes of each storage of model
    state, by category, at the start of each backward pass and of the update, when gradients of earlier micro-batches
    exist and parameters are gathered."""

    def __init__(self, mesh: Mesh, device: str, ranks: int) -> None:
        super().__init__(mesh, device, ranks)
        self.begin = 0
        self.samples: list[State] = []

    def run(self, step: Step, state: TrainState) -> None:
        """Run the step, with hooks on its passes that set the phase and record samples and messages."""

        def sample() -> None:
            held = state_tensors(state.parts, state.optimizer)
            self.samples.append({name: self.held(tensors) for name, tensors in held.items()})

        def updates(*_: object) -> None:
            self.world = False
            sample()

        passes = step.passes
        passes.run = during(self, "forward", passes.run)  # type: ignore[method-assign]
        for part in state.parts:
            part.register_forward_pre_hook(lambda *_: setattr(self, "phase", "forward"), prepend=True)
            # The phase is set before FSDP2 gathers for the backward pass; the sample is taken after that.
            part.register_forward_hook(_at_backward(lambda: setattr(self, "phase", "backward")), prepend=True)
            part.register_forward_hook(_at_backward(sample))
        for stage in [] if isinstance(passes, OnePart) else schedule_stages(passes.schedule):
            self._hook(stage, sample)
        state.optimizer.register_step_pre_hook(updates)
        self.begin = len(self.log)
        # Collectives between the gradients and the update are over the whole world.
        step(state, lambda _: setattr(self, "world", True))

    def _hook(self, stage: Any, sample: Callable[[], None]) -> None:
        """Wrap the methods of torch's pipeline stage that run backward passes and return messages."""
        weights = during(self, "backward", stage.backward_weight_one_chunk)

        def sampled(*args: Any, **options: Any) -> None:
            sample()
            weights(*args, **options)

        stage.backward_one_chunk = during(self, "backward", stage.backward_one_chunk)
        stage.backward_weight_one_chunk = sampled
        for name, phase in MESSAGE_METHODS.items():
            setattr(stage, name, during(self, phase, self._recording(getattr(stage, name))))

    def _recording(self, ask: Callable[[int], list[dist.P2POp]]) -> Callable[[int], list[dist.P2POp]]:
        """Return a function that calls `ask` and records the messages that it returns."""

        def recorded(chunk: int) -> list[dist.P2POp]:
            ops = ask(chunk)
            for op in ops:
                self.sent(op.group, "send" if op.op is dist.isend else "recv", op.tensor.nbytes)
            return ops

        return recorded


def during(watch: Any, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sets `watch.phase` while `call` runs."""

    def run(*args: Any, **options: Any) -> Any:
        before, watch.phase = watch.phase, phase
        try:
            return call(*args, **options)
        finally:
            watch.phase = before

    return run


def _at_backward(call: Callable[[], None]) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda part, inputs, out: where_backward_begins(out, call)


class _Pairwise:
    """A collective of FSDP2 that is implemented by pairwise messages, recorded as the collective."""

    def __init__(self, collective: PairwiseAllGather | PairwiseReduceScatter, kind: str, watch: OpRecorder) -> None:
        self.allocate, self._call, self._kind, self._watch = collective.allocate, collective, kind, watch

    def __call__(self, **given: Any) -> None:
        whole = given["output_tensor" if self._kind == "all_gather" else "input_tensor"]
        self._watch.sent(given["group"], self._kind, whole.nbytes)
        self._call(**given)


def watched_step(work: Workload, rank: int, micro_batches: int) -> StepWatch:
    """Run one step of that many micro-batches on a rank of the world, and return its watch."""
    with mesh_of(work.layout, rank) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # the engine compares pointers
        policy = policy_of(work)
        model = Model.of(work.model, policy)
        device_mesh = replace(mesh, device=torch.device(work.device))  # the device selects ZeRO's collectives
        parts = build_parts(model, work.parallelism, device_mesh, policy, ops_of(work))
        assume_loads(parts, work)
        watch = StepWatch(mesh, work.device, work.layout.world_size)
        for module in (module for part in parts for module in sharded_modules(part)):
            if work.device == "cpu" and mesh.size("dp_shard") > 1:
                module.set_custom_all_gather(_Pairwise(PairwiseAllGather(), "all_gather", watch))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_Pairwise(PairwiseReduceScatter(), "reduce_scatter", watch))  # type: ignore[arg-type]
        with FakeTensorMode(allow_non_fake_inputs=True), as_on(work.device):
            loader = _loader(work, micro_batches, watch)
            with watch:
                watch.run(*_build(work, mesh, model, parts, loader))
    return watch


def _build(work: Workload, mesh: Mesh, model: Model, parts: list[nn.Module], loader: Loader) -> tuple[Step, TrainState]:
    """Return the step and the state that `pretrain` would build, but without data and initial weights."""
    config, runner, policy = work.parallelism, StageRunner(parts, mesh, work.parallelism), policy_of(work)
    materialize(model, parts, CPU)
    optimizer = build_updates(work.optimizer, model, parts, policy, ops_of(work))
    optimizer_state(optimizer)  # creates the state
    passes = build_passes(
        model,
        runner,
        config,
        micro_batches=loader.num_micro_batches,
        micro_batch_size=work.micro_batch_size,
        sequence_length=work.sequence_length,
        example=None if work.sample is None else work.sample.x[0],
    )
    step = Step(mesh, passes, work.optimizer.lr, work.optimizer.clip_norm, Stopping(mesh, StopSignal()))
    return step, TrainState(model, runner, optimizer, Schedule(ConstantConfig(), 1), loader, {})


def _loader(work: Workload, micro_batches: int, watch: OpRecorder) -> Loader:
    """Return a stand-in for the loader, with only the attributes that a step uses. In a run on a CPU a separate thread
    creates the batches, so their memory is not counted."""
    tensors = (*zero_batch(work), torch.zeros(work.micro_batch_size, dtype=torch.int64))
    watch.leave_out(*tree_leaves(tensors))

    def batch(consumed_samples: int, micro_index: int) -> Batch:
        x, targets, numbers = tensors if work.device == "cpu" else tree_map(torch.clone, tensors)
        return (SampleBatch if work.sample else Batch)(x, targets, numbers)

    loader = SimpleNamespace(
        batch=batch, schedule=BatchSchedule(work.global_batch_size), stream=SimpleNamespace(seed=0)
    )
    loader.num_micro_batches, loader.micro_batches = micro_batches, lambda consumed_samples: micro_batches
    return cast(Loader, loader)


def assume_loads(parts: Sequence[nn.Module], work: Workload) -> None:
    """Set the ratio of received to sent rows that experts assume, because the tensors have no values."""
    for experts in (module for part in parts for module in part.modules() if isinstance(module, Experts)):
        experts.imbalance = work.imbalance


def zero_batch(work: Workload) -> tuple[Any, Any]:
    """Return the input and the targets of a micro-batch, filled with zeros."""
    rows, sample = work.micro_batch_size, work.sample
    if sample is None:
        return tuple(torch.zeros(rows, work.rank_length, dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]
    return tree_map(lambda leaf: torch.zeros(rows, *leaf.shape[1:], dtype=leaf.dtype), (sample.x, sample.target))


def ops_of(work: Workload) -> Ops:
    """Return the ops of a run with the workload's attention: reference ops for `matmul` on a CPU (`ops=reference`),
    else our kernels."""
    attention = Attention.sdpa if work.attention is Attention.auto else work.attention
    wanted = work.device == "cuda" or attention is not Attention.matmul
    if not wanted:
        return Ops(attention, CrossEntropy.reference)
    if not isinstance(load("cpu", lambda _: None), LoadedLibrary):
        return Ops(attention)
    table, gpu = work.device == "cpu", work.device == "cuda"
    plain = dict.fromkeys(PLAIN, True)
    return Ops(attention, CrossEntropy.fused, linear=gpu, table=table, fused_scores=gpu, deferred_add=gpu, **plain)


@contextmanager
def mesh_of(layout: Layout, rank: int) -> Iterator[Mesh]:
    """Yield a rank's mesh in a simulated world."""
    if layout.world_size == 1:
        yield Mesh(CPU, layout)
        return
    with imagined_world(rank, layout.world_size):
        yield mesh_over_world(CPU, layout, rank)


@contextmanager
def as_on(device: str, here: str = "cpu") -> Iterator[None]:
    """Give ops on tensors of device `here` the limits of `device`, e.g. the bytes of logits computed at a time."""
    limits = cast(tuple[dict[str, Any], ...], (LOGIT_BYTES, SOFTMAX_BYTES, PRODUCTS))
    before = [limit[here] for limit in limits]
    for limit in limits:
        limit[here] = limit[device]
    try:
        yield
    finally:
        for limit, value in zip(limits, before, strict=True):
            limit[here] = value


def policy_of(work: Workload) -> Policy:
    """Return the dtypes in which a run computes, gathers and reduces."""
    precision = Precision.fp8 if work.fp8 else Precision[f"amp_{work.amp}"] if work.amp else Precision.auto
    return Policy(
        DTYPES[work.dtype],
        "planned",
        precision,
        reduce=Reduce.compute if work.half_sums else Reduce.fp32,
        master_weights=work.master_weights,
    )
