"""Recording of a model's profile: one micro-batch, forward and backward, with fake tensors and simulated ranks.

The model's own code runs, sharded over the tensor, the context and the expert axis as in a run. A model of equal blocks
is built with two blocks, and the last one represents all; otherwise every block is recorded. ZeRO is left out, because
`memory.py` computes FSDP2's gathers and reductions from sizes. Under FSDP2, parameters have the dtype in which it
gathers them. `simulate.py` describes the devices of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.errors import ConfigError, first_line
from gptlite.models.batch_norm import SyncedBatchNorm
from gptlite.models.model import Model
from gptlite.models.registry import spec_of
from gptlite.ops.inputs import Inputs
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import Layout, splits_backward
from gptlite.precision import Policy
from gptlite.satellites.plan.parameters import BLOCKS, num_blocks, repeats, with_blocks
from gptlite.satellites.plan.segments import (
    ADDED,
    GRADIENT,
    PARTS,
    PLAIN,
    UPSTREAM,
    Halves,
    MemoryEvent,
    Op,
    Profile,
    Segment,
)
from gptlite.satellites.plan.simulate import CPU, as_on, assume_loads, mesh_of, ops_of, policy_of, zero_batch
from gptlite.satellites.plan.watch import Change, OpRecorder
from gptlite.satellites.plan.workload import Transfer, Workload, block_input
from gptlite.torch_private.ops import tree_leaves, tree_map
from gptlite.torch_private.recording import FakeTensorMode
from gptlite.torch_private.simulation import flash_attention_only, stage_backward_input, stage_backward_weight
from gptlite.trainer.parts import build_parts


@dataclass(frozen=True)
class _Part:
    """A part of the model being recorded. `marks` maps names of segments to the indices in the watch's log at which
    segments begin. The sets hold numbers of storages: `gradients` of the parameters' gradients, `entered` of the
    blocks' inputs, `upstream` of the gradients of the blocks' outputs, `strided` of those among them that are not
    contiguous, and `unseen` of storages that are not counted. `buffers` holds received gradients.
    """

    work: Workload
    model: Model
    module: nn.Module
    watch: OpRecorder
    marks: dict[str, int] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    upstream: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)
    strided: set[int] = field(default_factory=set)
    buffers: list[Tensor] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Begin a segment, unless a segment of that name has begun already."""
        self.marks.setdefault(name, len(self.watch.log))

    def order(self, names: Iterable[str]) -> None:
        """Bring marks into the order of `names`: a mark that is missing, or after the next mark, is set to the next."""
        place = len(self.watch.log)
        for name in reversed(list(names)):
            place = self.marks[name] = min(place, self.marks.get(name, place))

    def numbers(self, values: Any) -> set[int]:
        """Return the storage numbers of the tensors among `values`."""
        tensors = (local_tensor(each) for each in tree_leaves(values) if isinstance(each, Tensor))
        return set(self.watch.held(tensors))

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Record a parameter's complete gradient as freed, because a gradient that is added to an earlier one is freed
        at this point."""
        assert parameter.grad is not None
        held = self.watch.held([local_tensor(parameter.grad)])
        self.gradients.update(held)
        self.watch.log += [Change(number, -size) for number, size in held.items()]

    def segment(self, first: str, until: str, entered: bool = False) -> Segment:
        """Return the segment between two marks. `entered`: True for a block's forward pass."""
        log = self.watch.log[self._place(first) : self._place(until)]
        given = self.entered if entered else self.upstream
        changes = (each for each in log if isinstance(each, Change) and each.number not in self.unseen)
        return Segment(
            tuple(MemoryEvent(float(change.size), self._role(change, given)) for change in changes),
            tuple(each for each in log if isinstance(each, Op)),
            tuple(each for each in log if isinstance(each, Transfer)),
        )

    def _place(self, name: str) -> int:
        """Return the index at which a segment begins. Gradients freed before its first op belong to the previous
        segment, and so does any memory freed before the first op of the model's end."""
        log, place = self.watch.log, self.marks[name]
        while place < len(log) and isinstance(change := log[place], Change) and change.size < 0:
            if name != "end" and change.number not in self.gradients:
                break
            place += 1
        return place

    def _role(self, change: Change, received: set[int]) -> str:
        """Return the role of an event. `received`: storages that the segment received from its neighbour."""
        if change.number in self.gradients:
            return GRADIENT if change.size > 0 else ADDED
        return UPSTREAM if change.size < 0 and change.number in received else PLAIN

    def uncounted(self, values: Any) -> Any:
        """Return a tensor, or nested ones, after excluding their memory from the count."""
        self.watch.leave_out(*tree_leaves(values))
        return values

    def activations(self, block: int) -> Tensor:
        """Return zeros in the shape of a block's input, for the input of a part or the gradient of its output. They are
        not counted, because the estimate counts them as buffers of the pipeline."""
        return self.uncounted(torch.zeros(block_input(self.work, block), dtype=self.model.dtype))

    def received(self, gradient: Tensor) -> Tensor:
        """Return a gradient as it is received from another stage: contiguous, and in a buffer that the pipeline holds
        and the estimate counts."""
        self.buffers.append(gradient.contiguous())
        self.unseen.update(self.numbers([gradient, self.buffers[-1]]))
        return self.buffers[-1]

    def forward(self, x: Any, targets: Any) -> Tensor:
        """Run the part on a micro-batch."""
        numbers = self.uncounted(torch.zeros(self.work.micro_batch_size, dtype=torch.int64))
        inputs = Inputs(targets, numbers, None, 1.0)
        self.watch.phase = "forward"
        self.mark("begin")
        out = self.model.forward(self.module, x, inputs)
        self.watch.phase = "backward"
        return out


def record(work: Workload, tp_rank: int = 0) -> Profile:
    """Return the profile of a workload's model, recorded at the workload's micro-batch size."""
    profile, strided = _record(work, tp_rank)
    if strided and work.layout.size("pp") > 1:
        return replace(profile, received=_record(work, tp_rank, receives=True)[0].blocks_back)
    return profile


def _record(work: Workload, tp_rank: int, receives: bool = False) -> tuple[Profile, bool]:
    """Return a profile, and True if a block's output has a gradient that is not contiguous. `receives`: make these
    gradients contiguous, as they are if they come from another stage."""
    with _recorded(work, tp_rank, BLOCKS) as part:
        numbers = [f"{number}" for number in _mark_blocks(part, receives)]
        loss = part.forward(*part.uncounted(zero_batch(work)))
        loss.register_hook(lambda _: part.mark("end back"))
        loss.backward()
        part.mark("done")
    there = ["begin", *numbers, "end", "end back"]
    back = ["end back", *(f"{number} back" for number in reversed(numbers)), "begin back", "done"]
    part.order([*there, *back])
    begin, *blocks, end = (part.segment(*each, entered=each[0] in numbers) for each in pairwise(there))
    end_back, *blocks_back, begin_back = (part.segment(*each) for each in pairwise(back))
    kept = slice(-1, None) if repeats(work.model) else slice(None)
    back_kept = tuple(blocks_back[::-1][kept])
    return Profile(begin, tuple(blocks[kept]), end, begin_back, back_kept, end_back, back_kept), bool(part.strided)


def record_halves(work: Workload, blocks: range | None) -> Halves:
    """Return the profiles of split backward passes. `blocks`: the blocks of the recorded part if the model's blocks
    differ. With None, two parts are recorded: one with only blocks, and one with the model's end."""
    if blocks is not None:
        inputs, weights = _record_half(work, blocks, end=blocks.stop == num_blocks(work.model))
        return Halves(inputs, Segment(), weights, weights, parts=1)
    inputs, weights = _record_half(work, range(1, 1 + PARTS), end=False)
    inputs_end, weights_end = _record_half(work, range(2, 2 + PARTS), end=True)
    return Halves(inputs, inputs_end, weights, weights_end)


def _record_half(work: Workload, blocks: range, end: bool) -> tuple[Segment, Segment]:
    """Return both halves of a backward pass: I for the input's gradient and W for the weights' gradients.

    I is that of one block, or of the model's end if `end` is True; W is that of the whole part. If blocks differ, both
    are of the whole part.
    """
    with _recorded(work, 0, PARTS + 2) as part:
        part.model.spec.keep(part.module, part.model.config, blocks)
        names = [f"{number} back" for number in _mark_blocks(part)]
        x = part.activations(blocks.start).requires_grad_()
        gradient = None if end else [part.activations(blocks.stop)]
        _, targets = part.uncounted(zero_batch(work))
        out = part.forward(x, targets)
        part.mark("I")
        weights = list(part.module.parameters())
        found, groups = stage_backward_input([out], gradient, [x], iter(weights))
        part.mark("W")
        part.unseen.update(part.numbers(found[0]))  # the estimate counts it as a buffer of the pipeline
        for some in [groups] if repeats(work.model) else [[group] for group in groups]:
            before = [weight.grad for weight in weights]
            stage_backward_weight(iter(weights), some)
            for weight, earlier in zip(weights, before, strict=True):
                if weight.grad is not earlier:
                    part.accumulated(weight)
        part.mark("done")
    if not repeats(work.model):
        between = "I", "W"
    else:
        between = ("I", names[-1]) if end else (names[-1], names[-2])
    return part.segment(*between), part.segment("W", "done")


@contextmanager
def _recorded(work: Workload, tp_rank: int, blocks: int) -> Iterator[_Part]:
    """Yield the model with `blocks` blocks, sharded over the tensor, the context and the expert axis. Raises
    ConfigError if the model cannot run on tensors without values."""
    tensor, context, policy = work.layout.size("tp"), work.layout.context, policy_of(work)
    # Two data ranks represent any larger number: the tensors that they sum inside the model have the same sizes.
    data = 2 if work.layout.data_size > 1 and not spec_of(work.model).casts else 1
    expert = work.layout.size(EXPERT)
    layout = Layout((1, 1, lcm(data * context, expert), tensor), (context, expert))
    with mesh_of(layout, tp_rank) as mesh:
        model = Model.of(with_blocks(work.model, blocks), policy)
        # The mesh of the part has no data ranks, so that FSDP2 does not wrap the model.
        part_mesh = replace(mesh, layout=replace(layout, sizes=(1, 1, 1, tensor)), device=torch.device(work.device))
        (module,) = build_parts(model, _alone(work.parallelism), part_mesh, policy, ops_of(work))
        assume_loads([module], work)
        for each in module.modules():
            if isinstance(each, SyncedBatchNorm):
                each.mesh = mesh
        _own_parameters(model, module, policy if work.sharded else None)
        if work.layout.size("pp") == 1:  # in a pipeline both ends have a copy instead of a tied parameter
            model.tie(module)
        with _tensors(model, module, work.device) as device:
            for parameter in () if work.sharded else module.parameters():
                parameter.grad_dtype = torch.float32
            watch = OpRecorder(mesh, work.device, work.layout.world_size, device.type)
            watch.leave_out(*map(local_tensor, [*module.parameters(), *module.buffers()]))
            part = _Part(work, model, module, watch)
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(part.accumulated)
            try:
                with watch, device:
                    yield part
            except Exception as error:  # a model may raise anything
                if model.spec.casts:
                    raise
                raise ConfigError(
                    f"the {model.spec.name} model cannot be planned: a pass on tensors without values raises "
                    f"{type(error).__name__}: {first_line(error)}; give the layout "
                    "(parallelism=zero2, ...) instead of parallelism=auto"
                ) from error


@contextmanager
def _tensors(model: Model, module: nn.Module, device: str) -> Iterator[torch.device]:
    """Yield the device on which tensors are created: meta, which is fast, or under autocast a CPU with fake tensors,
    because autocast needs a device's casting rules."""
    if model.autocast is None:
        with as_on(device, "meta"), flash_attention_only():
            yield torch.device("meta")
        return
    with FakeTensorMode(allow_non_fake_inputs=True), as_on(device, "cpu"):
        module.to_empty(device=CPU)
        yield CPU


def _alone(config: ParallelismConfig) -> ParallelismConfig:
    """Return the parallelism of a single part, with split backward passes if the pipeline's schedule splits them."""
    split = splits_backward(config)
    pipeline = {"pipeline": 2 if split else 1, "schedule": config.schedule if split else "1f1b"}
    return replace(config, zero=0, dp_replicate=1, offload=Offload.none, **pipeline)


def _own_parameters(model: Model, module: nn.Module, gathers: Policy | None) -> None:
    """Replace each parameter by an independent one. `gathers`: the policy from which to take the dtype in which FSDP2
    gathers parameters; None without FSDP2."""
    dtype = None
    if gathers is not None:
        dtype = gathers.gather_dtype if model.autocast is None else gathers.parameter_dtype
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            setattr(each, name, nn.Parameter(parameter.detach().to(dtype or parameter.dtype), parameter.requires_grad))


def _mark_blocks(part: _Part, receives: bool = False) -> list[int]:
    """Register hooks that begin a segment at each block, forward and backward. Returns the blocks' numbers. `receives`:
    see `_record`."""
    blocks = part.model.blocks(part.module)
    if not blocks:
        return []
    first, last = (list(blocks.values())[place] for place in (0, -1))
    if part.work.layout.size("pp") > 1:  # a pipeline's part receives its input, and a receive buffer is contiguous
        contiguous = partial(tree_map, lambda value: value.contiguous() if isinstance(value, Tensor) else value)
        first.register_forward_pre_hook(lambda _, args: contiguous(args))
    first.register_forward_pre_hook(
        lambda _, args: _at_gradients(args, lambda _: part.mark("begin back")), prepend=True
    )
    for (number, block), before in zip(blocks.items(), [None, *blocks], strict=False):
        block.register_forward_pre_hook(partial(_enter, part, f"{number}", before), prepend=True)
        if receives:
            block.register_forward_hook(lambda _, __, out: _at_gradients(out, part.received))
        block.register_forward_hook(partial(_leave, part, f"{number} back"))
    last.register_forward_hook(lambda *_: part.mark("end"))
    return list(blocks)


def _enter(part: _Part, name: str, before: int | None, block: nn.Module, args: Any) -> None:
    part.mark(name)
    part.entered.update(part.numbers(args))
    if before is not None:  # FSDP2 reduces gradients here, before ops between the blocks
        _at_gradients(args, lambda _: part.mark(f"{before} back"))


def _leave(part: _Part, name: str, block: nn.Module, args: Any, out: Any) -> None:
    def given(gradient: Tensor) -> None:
        part.mark(name)
        part.upstream.update(held := part.numbers(gradient))
        part.strided.update(() if local_tensor(gradient).is_contiguous() else held)

    _at_gradients(out, given)


def _at_gradients(values: Any, then: Callable[[Tensor], Tensor | None]) -> None:
    """Call `then` with the gradient of each tensor among `values` when the backward pass has computed it. A result
    replaces the gradient."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(then)
