"""What real ranks on this CPU take of memory and send in a training step: the truth that the planner is held to.

    with Ranks(4) as ranks:                                           # distributed.cells.run
        found = ranks.run("plan.truth:counted", config)               # a Counted of each rank
    work = workload(config, world=4)                                  # the same step, as the planner has it

`config` is a gptlite.config.Config, as `load([*BASE, *overrides])` gives it. Each rank builds the run as `pretrain`
does and takes real steps. Bytes are counted in one step, from allocation events (MemoryWatch, and the buffers that a
pipeline keeps from its first step on); collectives in another, at torch's dispatcher. Nothing of the
planner's arithmetic is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptlite.config import Config
from gptlite.ops.select import select_ops
from gptlite.parallelism import point_to_point
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.layout import AXES, resolve
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.pipeline import OnePart, Pipeline, _Stage
from gptlite.satellites.compressed import sums
from gptlite.satellites.compressed.gradients import CompressedReduction
from gptlite.satellites.compressed.powersgd import LowRankReduction
from gptlite.satellites.monitor.memory_watch import MemoryWatch, where_backward_begins
from gptlite.satellites.onebit.reduction import OneBitReduction
from gptlite.satellites.parity.record import build
from gptlite.satellites.plan.planning import workload_of
from gptlite.satellites.plan.simulate import MESSAGE_METHODS, during
from gptlite.satellites.plan.traffic import data_bytes
from gptlite.satellites.plan.watch import KINDS
from gptlite.satellites.plan.workload import ACROSS, INSIDE, RankBytes, Transfer, Workload
from gptlite.satellites.zeropp.reduction import ZeroppReduction
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

BASE = """
data=synthetic data.num_tokens=20000 precision=fp32 schedule=constant schedule.warmup_steps=0
run.dir=unused run.name=truth trainer.max_steps=1000
""".split()


@dataclass(frozen=True)
class Counted:
    """What one rank took in a step. `coordinates` is its place on each axis of AXES."""

    coordinates: dict[str, int]
    bytes: RankBytes
    transfers: list[Transfer]


def workload(config: Config, world: int) -> Workload:
    """The same step as the planner has it."""
    ops = select_ops(config.ops, torch.device("cpu"), lambda _: None)
    work = workload_of(config, resolve(config.parallelism, world), replace(config.cluster, device="cpu"))
    return replace(work, attention=ops.attention)


def counted(config: Config) -> Counted:
    """On every rank of the world at once: a step to warm up, one whose bytes are counted, one whose messages are."""
    mesh = build_mesh(config.parallelism)
    state, step = build(config, mesh)
    try:
        with closing(state.loader):
            step(state)
            # What a collective's own thread gives back is noticed late: it only ever adds, so the least is right.
            # On a busy machine three steps in a row can be late.
            sizes = [count_bytes(state, step) for _ in range(8)]
            kept = max(size.compression for size in sizes)  # 0/1 Adam keeps more between two exchanges
            found = replace(min(sizes, key=lambda size: size.activations), compression=kept)
            transfers = count_transfers(state, step)
    finally:
        mesh.close()
    return Counted({axis: mesh.coordinate(axis) for axis in AXES}, found, transfers)


def count_bytes(state: TrainState, step: Step) -> RankBytes:
    """The most that a step takes, by category, each at its most; activations are all that is no model state."""
    with ExitStack() as stack:
        watch = stack.enter_context(
            MemoryWatch(state.parts, state.optimizer, step.mesh.device, state.loader.num_micro_batches)
        )
        for part in state.parts:  # at each backward pass, not the step's last alone
            stack.callback(part.register_forward_hook(_sampling(watch)).remove)
        weights = _Stage.backward_weight_one_chunk

        def sampled(*args: Any, **options: Any) -> None:
            watch.sample()
            weights(*args, **options)

        stack.enter_context(mock.patch.object(_Stage, "backward_weight_one_chunk", sampled))
        step(state)
    found = watch.found()
    kept = sum(pipeline_buffers(step.passes).values())
    size, beside = found.state, found.activations + kept
    errors = sum(map(_bytes, kept_tensors(step.mesh.reduction)))
    return RankBytes(size.parameters, size.gradients, size.optimizer, beside, compression=errors)


def kept_tensors(reduction: object) -> list[Tensor | None]:
    """What compressed communication keeps between steps."""
    match reduction:
        case CompressedReduction():
            factors = reduction._factors.values() if isinstance(reduction, LowRankReduction) else ()
            return [*(errors.values for errors in reduction._errors.values()), *factors]
        case OneBitReduction():
            exchange = reduction.exchange
            whole = exchange._momenta.values() if exchange.whole else ()
            parts = (part for vector in exchange.vectors for part in (vector.errors, vector.mask))
            alone = exchange.pending
            steps = [*alone.anchors.values(), *alone.moved.values()] if alone else []
            return [*parts, *exchange._roots.values(), *whole, *steps]
        case ZeroppReduction():
            return [gather.copy for gather in reduction.gathers.values()]
        case _:
            return []


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _sampling(watch: MemoryWatch) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that has the watch sample where the backward pass from a part's output begins."""

    def hook(part: nn.Module, inputs: Any, out: Tensor) -> None:
        where_backward_begins(out, watch.sample)

    return hook


def pipeline_buffers(passes: object) -> dict[int, int]:
    """Bytes of what a pipeline's stages keep between steps: what they receive into, by address."""
    if not isinstance(passes, Pipeline):
        return {}
    schedule: Any = passes.schedule
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    infos = [
        info for stage in stages for each in (stage.args_recv_info, stage.grad_recv_info) for info in each.values()
    ]
    buffers = [info.buffer for each in infos for info in each if getattr(info, "buffer", None) is not None]
    buffers += [buffer.grad for buffer in buffers if buffer.grad is not None]  # which a split backward pass leaves
    return {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}


def count_transfers(state: TrainState, step: Step) -> list[Transfer]:
    """Every collective and message of a step, equal ones together."""
    with Recorder(step.mesh) as recorder:
        step(state)
    return recorder.transfers()


def data_bytes_of_steps(config: Config, count: int) -> list[float]:
    """The bytes that each rank sends along the data axes in each of a run's first steps."""
    mesh = build_mesh(config.parallelism)
    state, step = build(config, mesh)
    try:
        with closing(state.loader):
            return [data_bytes(count_transfers(state, step)) for _ in range(count)]
    finally:
        mesh.close()


WORLD_PHASE = "settle"
BACKWARD = ("backward_one_chunk", "backward_weight_one_chunk")


class Recorder(TorchDispatchMode):
    """While entered, notes what this rank's thread sends and receives, by axis, kind, payload and phase.

    The two collectives of FSDP2 that run as messages between pairs on a CPU count as what they are. Whether a message
    of the pipeline is an activation or a gradient is seen where torch's stage asks for it.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.counts: Counter[tuple[str, str, int, int, str]] = Counter()
        self.asked: Counter[tuple[str, int]] = Counter()  # the pipeline's messages, as its stages ask for them
        self.sent: Counter[tuple[str, int]] = Counter()  # and as they are seen
        groups = reversed((mesh.groups() | mesh.expert_groups()).items())  # axes over the same ranks may share one
        self._axes = {group.group_name: axis for axis, group in groups}
        if isinstance(mesh.reduction, ZeroppReduction) and mesh.subgroups:
            nodes = mesh.reduction.nodes
            for axis, part in ((INSIDE, nodes.inside), (ACROSS, nodes.across)):
                self._axes |= {} if part is None else {part.group_name: axis}
        self._experts = mesh.folded_groups[EXPERT].group_name if mesh.size(EXPERT) > 1 else None
        self.phase, self._inside = "step", False
        self._open = ExitStack()

    def __enter__(self) -> Recorder:
        for patch in self._patches():
            self._open.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self._inside:
            self._saw(func._opname, args)
        return func(*args, **(kwargs or {}))

    def transfers(self) -> list[Transfer]:
        """All there were, equal ones together. Raises AssertionError if the pipeline sent what no stage asked for."""
        assert self.asked == self.sent, f"asked for {self.asked}, sent {self.sent}"
        return [Transfer(*key[:4], count, key[4]) for key, count in sorted(self.counts.items())]

    def _saw(self, name: str, args: Any) -> None:
        kind = KINDS[name]
        group = next(group for arg in args if (group := _group(arg)) is not None)
        # An axis as long as the world shares its group: the step's own sum is known by where it is taken.
        axis = "world" if self.phase == WORLD_PHASE else self._axes.get(group.group_name)
        if kind == "all_to_all" and group.group_name == self._experts:
            axis = EXPERT
        if group.size() == 1:  # of the experts' mesh, an axis of one rank
            return
        assert axis is not None
        phase = "step" if self.phase == WORLD_PHASE else self.phase
        whole = args[1] if kind in ("reduce_scatter", "all_to_all") else args[0]
        payload = sum(tensor.nbytes for tensor in (whole if isinstance(whole, list) else [whole]))
        if kind in ("send", "recv") and phase != "step":
            assert axis == "pp"
            self.sent[kind, payload] += 1
        else:
            ranks = 2 if kind in ("send", "recv") else group.size()
            self.counts[axis, kind, ranks, payload, phase] += 1

    def _patches(self) -> Iterator[Any]:
        yield mock.patch.object(point_to_point.PairwiseAllGather, "__call__", self._pairwise("all_gather"))
        yield mock.patch.object(point_to_point.PairwiseReduceScatter, "__call__", self._pairwise("reduce_scatter"))
        for name, phase in MESSAGE_METHODS.items():
            yield mock.patch.object(_Stage, name, self._asking(name, phase))
        yield mock.patch.object(sums, "_exchange", self._exchange(sums._exchange))
        square = OneBitReduction.gradient_square  # over the data axes alone
        yield mock.patch.object(OneBitReduction, "gradient_square", during(self, "step", square))
        yield mock.patch.object(Step, "_total", during(self, WORLD_PHASE, Step._total))
        for owner in (OnePart, Pipeline):
            yield mock.patch.object(owner, "run", during(self, "forward", owner.run))
        for owner, name in (
            (torch.autograd, "backward"),
            (torch.autograd, "grad"),
            *((_Stage, each) for each in BACKWARD),
        ):
            yield mock.patch.object(owner, name, during(self, "backward", getattr(owner, name)))

    def _pairwise(self, kind: str) -> Callable[..., None]:
        cls = {"all_gather": point_to_point.PairwiseAllGather, "reduce_scatter": point_to_point.PairwiseReduceScatter}
        call = cls[kind].__call__

        def counted(
            this: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *more: Any, **given: Any
        ) -> None:
            payload = (output_tensor if kind == "all_gather" else input_tensor).nbytes
            self.counts[self._axes[group.group_name], kind, group.size(), payload, self.phase] += 1
            before, self._inside = self._inside, True
            call(this, output_tensor, input_tensor, group, *more, **given)
            self._inside = before

        return counted

    def _exchange(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Messages of compressed sums, as one all-to-all with the message that a rank does not send to itself."""

        def counted(messages: dict[int, Tensor], group: dist.ProcessGroup, *more: Any) -> Any:
            sent = sum(message.nbytes for message in messages.values())
            payload = sent * group.size() // (group.size() - 1)
            phase = "step" if self.phase == WORLD_PHASE else self.phase
            self.counts[self._axes[group.group_name], "all_to_all", group.size(), payload, phase] += 1
            before, self._inside = self._inside, True
            result = exchange(messages, group, *more)
            self._inside = before
            return result

        return counted

    def _asking(self, name: str, phase: str) -> Callable[..., list[dist.P2POp]]:
        call = getattr(_Stage, name)

        def counted(stage: _Stage, chunk: int) -> list[dist.P2POp]:
            ops = call(stage, chunk)
            for op in ops:
                kind = "send" if op.op is dist.isend else "recv"
                self.asked[kind, op.tensor.nbytes] += 1
                self.counts["pp", kind, 2, op.tensor.nbytes, phase] += 1
            return ops

        return counted


def _group(value: Any) -> dist.ProcessGroup | None:
    """The process group that a dispatched collective was given, where a value is one."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # a reduction's kind, say
        return None
