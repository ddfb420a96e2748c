"""Records a model's profile: one micro-batch, forward and backward, with fake tensors and imagined ranks.

The model's own code runs, cut over the tensor and the context axis as a run would cut it, with two blocks: the
last one is like any other. ZeRO is left out, for what FSDP2 gathers and reduces follows from sizes (`passes.py`);
where it holds the parameters they have the dtype that it gathers. See `simulate_step.py` for the devices of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from gptlite.inputs import Inputs
from gptlite.models.model import Model
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import Layout, splits_backward
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import flash_attention_only, stage_backward_input, stage_backward_weight
from gptlite.parallelism.zero import local_tensor
from gptlite.plan.parameters import BLOCKS, with_blocks
from gptlite.plan.profile import ADDED, GRADIENT, PARTS, UPSTREAM, Event, Halves, Op, Profile, Segment, Sent
from gptlite.plan.simulate_ops import op_of
from gptlite.plan.simulate_step import CPU, as_on, mesh_of, ops_of, policy_of
from gptlite.plan.simulate_watch import Watch
from gptlite.plan.workload import Workload
from gptlite.precision import Policy
from gptlite.trainer.build import build_parts


class Probe(Watch):
    """A watch that also keeps each op and transfer in order, and which storages are gradients."""

    def __init__(self, mesh: Mesh, device: str) -> None:
        super().__init__(mesh, device)
        self.ops: list[Op] = []
        self.transfers: list[Sent] = []
        self.points: list[tuple[str, int, int, int]] = []
        self.gradients: dict[int, int] = {}  # by storage: the change after which it has been added to earlier ones
        self.entered = set[int]()  # storages of what blocks are given
        self.upstream = set[int]()  # and of the gradients that they are given
        self._next = ""
        self.unseen = set[int]()  # storages counted elsewhere

    def point(self, name: str) -> None:
        """A segment begins."""
        self.points.append((name, len(self.changes), len(self.ops), len(self.transfers)))

    def point_at_next_op(self, name: str) -> None:
        """A segment begins with the next op: what is given back until then is of the one before."""
        self._next = name

    def count(self, axis: str, kind: str, ranks: int, payload: int) -> None:
        """Notes one transfer, in order."""
        super().count(axis, kind, ranks, payload)
        self.transfers.append(Sent(axis, kind, ranks, float(payload), self.phase))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._next and func is not torch.ops.prim.device.default:
            self.point(self._next)
            self._next = ""
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _ran(self, func: Any, args: Any, out: Any) -> None:
        if (op := op_of(func, args, out)) is not None:
            self.ops.append(op)

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, if it is known."""
        entry = self._storages.get(local_tensor(tensor).untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def accumulated(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is complete."""
        assert parameter.grad is not None
        if (number := self.number(parameter.grad)) is not None:
            self.gradients[number] = len(self.changes)

    def segment(self, first: str, until: str, entered: bool = False) -> Segment:
        """What happened between two points. `entered`: the segment is a block's forward pass."""
        places = {name: place for name, *place in self.points}
        (change, op, sent), (last, last_op, last_sent) = places[first], places[until]
        return Segment(
            tuple(self._events(change, last, self.entered if entered else self.upstream)),
            tuple(self.ops[op:last_op]),
            tuple(self.transfers[sent:last_sent]),
        )

    def _events(self, first: int, last: int, given: set[int]) -> Iterator[Event]:
        done: dict[int, list[int]] = {}
        for number, at in self.gradients.items():
            done.setdefault(at, []).append(number)
        sizes = dict[int, int]()
        for number, size in self.changes:
            if number in self.gradients:
                sizes[number] = max(sizes.get(number, 0), size)
        for place in range(first, last + 1):
            if place > first or first == 0:
                yield from (Event(float(-sizes[number]), ADDED) for number in done.get(place, ()))
            if place == last:
                return
            number, size = self.changes[place]
            if number in self.unseen:
                continue
            if number in self.gradients:
                if size > 0:
                    yield Event(float(size), GRADIENT)
            elif number in given and size < 0:
                yield Event(float(size), UPSTREAM)
            else:
                yield Event(float(size))


@dataclass(frozen=True)
class _Part:
    """A part of the model that is recorded."""

    module: nn.Module
    model: Model
    watch: Probe
    work: Workload

    def inputs(self) -> Inputs:
        """Targets and sample numbers of a micro-batch, which do not count."""
        shape = (self.work.micro_batch_size, self.work.rank_length)
        targets, samples = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[:1], dtype=torch.int64)
        self.watch.leave_out(targets, samples)
        return Inputs(targets, samples, None, 1.0)

    def tokens(self) -> Tensor:
        """A micro-batch's, which do not count."""
        tokens = torch.zeros((self.work.micro_batch_size, self.work.rank_length), dtype=torch.int64)
        self.watch.leave_out(tokens)
        return tokens

    def activations(self) -> Tensor:
        """What a part is given by the one before, or the gradient of what it gives: counted as a pipeline's buffer."""
        slices = self.work.layout.size("tp") if self.work.parallelism.sequence else 1
        shape = self.model.activations(self.work.micro_batch_size, self.work.rank_length // slices)
        x = torch.zeros(shape, dtype=self.model.dtype)
        self.watch.leave_out(x)
        return x


def record(work: Workload, tp_rank: int = 0) -> Profile:
    """The profile of a workload's model at its own size of micro-batch."""
    with _recorded(work, tp_rank, BLOCKS) as part:
        watch, numbers = part.watch, list(part.model.blocks(part.module))
        _watch_blocks(part)
        x, inputs = part.tokens(), part.inputs()
        watch.phase = "forward"
        watch.point("begin")
        loss = part.model.forward(part.module, x, inputs)
        loss.register_hook(lambda _: watch.point("end back"))
        watch.phase = "backward"
        loss.backward()
        watch.point("done")
    last, before = f"{numbers[-1]}", f"{numbers[-2]} back" if len(numbers) > 1 else "begin back"
    return Profile(
        begin=watch.segment("begin", f"{numbers[0]}"),
        block=watch.segment(last, "end", entered=True),
        end=watch.segment("end", "end back"),
        begin_back=watch.segment("begin back", "done"),
        block_back=watch.segment(f"{last} back", before),
        end_back=watch.segment("end back", f"{last} back"),
    )


def record_halves(work: Workload) -> Halves:
    """Both halves of backward passes: of a part with blocks alone, and of one with the end of the model."""
    inputs, weights = _record_half(work, end=False)
    inputs_end, weights_end = _record_half(work, end=True)
    return Halves(inputs["block"], inputs_end["end"], weights, weights_end)


def _record_half(work: Workload, end: bool) -> tuple[dict[str, Segment], Segment]:
    with _recorded(work, 0, PARTS + 2) as part:
        watch, model = part.watch, part.model
        first = 2 if end else 1
        model.spec.keep(part.module, model.config, range(first, first + PARTS))
        _watch_blocks(part)
        x, inputs = part.activations().requires_grad_(), part.inputs()
        gradient = None if end else [part.activations()]
        watch.phase = "forward"
        out = model.forward(part.module, x, inputs)
        watch.phase = "backward"
        watch.point("I")
        weights = list(part.module.parameters())
        found, groups = stage_backward_input([out], gradient, [x], iter(weights))
        watch.point("W")
        if found[0] is not None and (number := watch.number(found[0])) is not None:
            watch.unseen.add(number)  # a buffer of the pipeline's, to the end of the step
        stage_backward_weight(iter(weights), groups)
        for weight in weights:
            watch.accumulated(weight)
        watch.point("done")
        last, before = (f"{number} back" for number in (first + PARTS - 1, first + PARTS - 2))
        segments = {"end": watch.segment("I", last), "block": watch.segment(last, before)}
        return segments, watch.segment("W", "done")


@contextmanager
def _recorded(work: Workload, tp_rank: int, blocks: int) -> Iterator[_Part]:
    """The model with so many blocks, as the ranks of the tensor and the context axis share it."""
    tensor, context, policy = work.layout.size("tp"), work.layout.context, policy_of(work)
    layout = Layout((1, 1, context, tensor), (context,))
    with mesh_of(layout, tp_rank) as mesh:
        model = Model.of(with_blocks(work.model, blocks), policy)
        # Without data ranks, so that FSDP2 does not hold it.
        there = replace(mesh, layout=replace(layout, sizes=(1, 1, 1, tensor)), device=torch.device(work.device))
        (module,) = build_parts(model, _alone(work.parallelism), there, policy, ops_of(work))
        _own_parameters(model, module, policy if work.sharded else None)
        if work.layout.size("pp") == 1:  # a pipeline's ends have copies
            model.tie(module)
        with _tensors(model, module, work.device) as device:
            for parameter in () if work.sharded else module.parameters():
                parameter.grad_dtype = torch.float32
            watch = Probe(mesh, work.device)
            watch.stand_in = device.type
            watch.leave_out(*map(local_tensor, [*module.parameters(), *module.buffers()]))
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(watch.accumulated)
            with watch, device:
                yield _Part(module, model, watch, work)


@contextmanager
def _tensors(model: Model, module: nn.Module, device: str) -> Iterator[torch.device]:
    """Where tensors are made: on the meta device, which is quick; fake ones on a CPU under autocast, which has to know
    a device's rules."""
    if model.autocast is None:
        with as_on(device, "meta"), flash_attention_only():
            yield torch.device("meta")
        return
    with FakeTensorMode(allow_non_fake_inputs=True), as_on(device, "cpu"):
        module.to_empty(device=CPU)
        yield CPU


def _alone(config: ParallelismConfig) -> ParallelismConfig:
    """One part, whose backward pass is in halves where a pipeline's would be."""
    split = splits_backward(config)
    pipeline = {"pipeline": 2 if split else 1, "schedule": config.schedule if split else "1f1b"}
    return replace(config, zero=0, dp_replicate=1, offload=Offload.none, **pipeline)


def _own_parameters(model: Model, module: nn.Module, gathers: Policy | None) -> None:
    """Makes each parameter of a module one by itself, in the dtype in which FSDP2 gathers it, if it does."""
    dtype = None
    if gathers is not None:
        dtype = gathers.gather_dtype if model.autocast is None else gathers.parameter_dtype
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            setattr(each, name, nn.Parameter(parameter.detach().to(dtype or parameter.dtype), parameter.requires_grad))


def _watch_blocks(part: _Part) -> None:
    """Has a segment begin at each block, forward and backward."""
    watch, blocks = part.watch, part.model.blocks(part.module)
    *_, last = blocks
    for number, block in blocks.items():
        first = number == next(iter(blocks))
        if first and part.work.layout.size("pp") > 1:
            block.register_forward_pre_hook(_received)
        block.register_forward_pre_hook(partial(_enter, watch, str(number), first), prepend=True)
        block.register_forward_hook(partial(_leave, watch, str(number), number == last))


def _received(block: nn.Module, args: Any) -> Any:
    """What a pipeline's part is given is contiguous, as the one before has sent it."""
    return tree_map(lambda value: value.contiguous() if isinstance(value, Tensor) else value, args)


def _enter(watch: Probe, name: str, first: bool, block: nn.Module, args: Any) -> None:
    watch.point(name)
    numbers = (watch.number(each) for each in tree_leaves(args) if isinstance(each, Tensor))
    watch.entered |= {number for number in numbers if number is not None}
    if first:
        _at_gradients(args, lambda first, _: watch.point("begin back") if first else None)


def _leave(watch: Probe, name: str, last: bool, block: nn.Module, args: Any, out: Any) -> None:
    def given(first: bool, gradient: Tensor) -> None:
        if first:
            watch.point(f"{name} back")
        if (number := watch.number(gradient)) is not None:
            watch.upstream.add(number)

    _at_gradients(out, given)
    if last:
        watch.point_at_next_op("end")


def _at_gradients(values: Any, then: Callable[[bool, Tensor], None]) -> None:
    """Calls `then` with the gradient of each tensor among some values as it is used, and whether it is the first."""
    seen: list[None] = []

    def hook(gradient: Tensor) -> None:
        seen.append(None)
        then(len(seen) == 1, gradient)

    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(hook)
