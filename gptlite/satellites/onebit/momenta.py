"""Momenta of a 1-bit optimizer after its warm-up: exchanged between the data ranks as signs, with error feedback.

Gradients here are sums over the ranks, g = sum_i g_i, so rank i contributes beta1 m / W + (1 - beta1) g_i, and the sum
over the W ranks is Adam's own momentum (arXiv:2102.02888, algorithm 1, which has means instead).

They are exchanged in units of Adam's update: divided by r, the roots of the second moments. As these are fixed, the
sum stays linear in the gradients, and errors are what is still to be added to the parameters. A sign has the magnitude
of its block's mean, so m itself would move an element of tiny r much further than the others (docs/onebit.md). For the
same reason r is at least LEAST of the parameter's root mean square.

Elements whose second moment is 0, as in rows that no token has used, are left out: they send nothing, and their
momentum is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gptlite.optimizer.base import local_gradients
from gptlite.parallelism.boxes import ShardedDim, cuts
from gptlite.parallelism.collectives import gather_objects, sum_over_cuts
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import is_cut
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.errors import shape_over
from gptlite.satellites.compressed.sums import Counted, all_reduce, all_reduce_bytes
from gptlite.torch_private.distributed import all_gather_single

CODEC = CODECS["sign"]
LEAST = 1e-2
State = Callable[[Tensor, str], Tensor]  # an optimizer's state tensor of a parameter, by key


class Momenta:
    """Momenta on one data rank, which has nothing to send. `state` returns this rank's part of a state tensor."""

    def advance(self, parameters: Sequence[nn.Parameter], state: State, beta1: float, factor: Tensor | None) -> None:
        """Set each m to beta1 m + (1 - beta1) factor g, with 0 where the second moment is 0. No factor means 1."""
        for parameter in parameters:
            first, second = state(parameter, "exp_avg"), state(parameter, "exp_avg_sq")
            add_gradient(first.mul_(beta1), next(iter(local_gradients([parameter])), None), 1 - beta1, factor)
            first.mul_(second != 0)

    def roots(self, parameters: Sequence[nn.Parameter], state: State) -> list[Tensor]:
        """Return this rank's part of each r, the roots of second moments after the warm-up. Collective over the ranks
        that hold a parameter's slices."""
        return floored(
            [state(parameter, "exp_avg_sq") for parameter in parameters], [cuts(each) for each in parameters]
        )

    def refreshed(self) -> None:
        """Note that second moments have changed."""


def floored(seconds: Sequence[Tensor], sharded: Sequence[Sequence[ShardedDim]]) -> list[Tensor]:
    """Return the roots of second moments, at least LEAST of their root mean square without zeros.

    The mean is over whole parameters, of which `seconds` are slices along the axes in `sharded`, so the roots do not
    depend on the layout. Collective over these axes.
    """
    sums = [torch.stack([each.sum(dtype=torch.float64), (each != 0).sum().double()]) for each in seconds]
    roots = []
    for second, (total, count) in zip(seconds, sum_over_cuts(sums, sharded), strict=True):
        least = LEAST * (total / count.clamp(min=1)).sqrt()
        roots.append(second.sqrt().clamp_(min=least.to(second.dtype)))
    return roots


def add_gradient(into: Tensor, gradient: Tensor | None, weight: float, factor: Tensor | None) -> None:
    """Add weight · factor · gradient to a tensor. A parameter without a gradient has one of zeros."""
    if gradient is not None:
        into.add_(gradient if factor is None else gradient * factor.to(gradient.device), alpha=weight)


@dataclass
class Vector:
    """Parameters that are exchanged together, as blocks [W, blocks, width]."""

    names: list[str]
    parameters: list[nn.Parameter]
    layout: BlockLayout
    shapes: list[torch.Size]
    mask: Tensor | None = None  # False for elements that are left out, and for padding
    errors: Tensor | None = None

    def views(self, blocks: Tensor) -> list[Tensor]:
        """Return each parameter's part of the blocks, in its shape."""
        return [part.view(shape) for part, shape in zip(self.layout.views(blocks), self.shapes, strict=True)]


@dataclass
class Pending:
    """Steps that a rank has taken alone since the last exchange (0/1 Adam), `steps` in number.

    `anchors`: the parameters of all ranks then, with weight decay since. `moved`: the rank's sums of rate · momentum.
    `rates`: the sum of rates of each parameter group.
    """

    anchors: dict[nn.Parameter, Tensor]
    moved: dict[nn.Parameter, Tensor]
    rates: list[float]
    steps: int = 0


def vector_layout(sizes: tuple[int, ...], ranks: int) -> BlockLayout:
    """Return the alignment of a vector of parameters of these sizes, in an equal number of blocks for each rank."""
    return BlockLayout(sizes, CODEC.width, multiple=ranks)


class Exchange(Momenta):
    """Momenta that the ranks of one data axis exchange.

    With ZeRO 0, and with replicas of shards (HSDP), a rank holds all values that it exchanges. With ZeRO 1 it stores a
    shard of parameters and state, but contributes to all values: `whole` is then True, and the ranks keep whole copies
    of the momenta.

    Vectors are separate for parameters that tensor ranks hold slices of, for those that they hold copies of, and for
    each tied parameter. So the blocks of copies, and the ranks that sum them, depend on nothing but their own values,
    and copies stay equal bit for bit.
    """

    def __init__(self, mesh: Mesh, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.mesh, self.whole = mesh, mesh.size("dp_replicate") == 1
        self.axis = "dp_shard" if self.whole else "dp_replicate"
        self.size, self.lane, self.group = mesh.size(self.axis), mesh.coordinate(self.axis), mesh.group(self.axis)
        self.gradients: dict[nn.Parameter, Tensor] = {}  # whole ones of this rank, if `whole`
        self.counted = Counted()
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in named if parameter.ndim]
        self.scalars = {parameter for _, parameter in named if not parameter.ndim}  # zero.py sums their gradients
        tied = _tied(mesh, [name for name, _ in named])
        groups: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for at, (name, parameter) in enumerate(named):
            if parameter.ndim:
                groups.setdefault((name, at) if name in tied else is_cut(parameter), []).append((name, parameter))
        self.tied = [
            [each for name, each in named if name == tie] for tie in sorted(tied & {name for name, _ in named})
        ]
        self.vectors = [self._vector(*zip(*members, strict=True)) for members in groups.values()]
        self._momenta: dict[nn.Parameter, Tensor] = {}
        self._roots: dict[nn.Parameter, Tensor] = {}
        self._ready = False
        self.pending: Pending | None = None

    def advance(self, parameters: Sequence[nn.Parameter], state: State, beta1: float, factor: Tensor | None) -> None:
        """Set each m to the exchanged sum of all ranks' beta1 m / W + (1 - beta1) factor g_i. Collective."""
        if not self._ready:
            self._prepare(state)
        super().advance([each for each in parameters if each in self.scalars], state, beta1, factor)
        for vector in self.vectors:
            blocks = vector.layout.new(self.mesh.device)
            for view, parameter in zip(vector.views(blocks), vector.parameters, strict=True):
                torch.mul(self._momenta[parameter], beta1 / self.size, out=view)
                add_gradient(view, self.gradient(parameter), 1 - beta1, factor)
                view.div_(self._roots[parameter])
            self._sum(vector, blocks)
            for view, parameter in zip(vector.views(blocks), vector.parameters, strict=True):
                torch.mul(view, self._roots[parameter], out=self._momenta[parameter])
                if self.whole:
                    state(parameter, "exp_avg").copy_(self._own(parameter, self._momenta[parameter]))
        self.gradients = {}

    def advance_alone(
        self, parameters: Sequence[nn.Parameter], state: State, beta1: float, factor: Tensor | None
    ) -> None:
        """Set each m to this rank's beta1 m + (1 - beta1) factor W g_i. Not if momenta are `whole`."""
        if not self._ready:
            self._prepare(state)
        super().advance([each for each in parameters if each in self.scalars], state, beta1, factor)
        for vector in self.vectors:
            assert vector.mask is not None
            for mask, parameter in zip(vector.views(vector.mask), vector.parameters, strict=True):
                first = state(parameter, "exp_avg").mul_(beta1)
                add_gradient(first, self.gradient(parameter), (1 - beta1) * self.size, factor)
                first.mul_(mask)

    def average(self, pending: Pending, rates: Mapping[nn.Parameter, float], state: State) -> None:
        """Set each m to the exchanged mean of all ranks' momenta in their `pending` steps, weighted by rate. `rates`:
        the sum of each parameter's rates. Collective."""
        for vector in self.vectors:
            blocks = vector.layout.new(self.mesh.device)
            for view, parameter in zip(vector.views(blocks), vector.parameters, strict=True):
                torch.mul(pending.moved[parameter], pending.steps / (rates[parameter] * self.size), out=view)
                view.div_(self._roots[parameter])
            self._sum(vector, blocks)
            for view, parameter in zip(vector.views(blocks), vector.parameters, strict=True):
                state(parameter, "exp_avg").copy_(view.mul_(self._roots[parameter]).div_(pending.steps))

    def _sum(self, vector: Vector, blocks: Tensor) -> None:
        """Replace values in units of the update, but for those that are left out, by their sum over the ranks."""
        assert vector.mask is not None
        assert vector.errors is not None
        blocks.mul_(vector.mask)
        chunks = partial(torch.Tensor.view, size=(self.size, -1, CODEC.width))
        all_reduce(chunks(blocks), chunks(vector.errors), CODEC, self.group, chunks(vector.mask), self.counted)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends for an exchange, and those of a ring's sum of fp32 gradients."""
        sent = sum(all_reduce_bytes(CODEC, each.layout.blocks // self.size, self.size) for each in self.vectors)
        elements = sum(sum(each.layout.sizes) for each in self.vectors)
        return sent, 2 * (self.size - 1) * torch.float32.itemsize * elements // self.size

    def roots(self, parameters: Sequence[nn.Parameter], state: State) -> list[Tensor]:
        """Return this rank's part of each r, after a call of `advance`."""
        scalars = [each for each in parameters if each in self.scalars]
        roots = self._roots | dict(zip(scalars, super().roots(scalars, state), strict=True))
        return [
            self._own(each, roots[each]) if self.whole and each not in self.scalars else roots[each]
            for each in parameters
        ]

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's own gradient of the values that it exchanges."""
        if self.whole:
            return self.gradients.get(parameter)
        return next(iter(local_gradients([parameter])), None)

    def refreshed(self) -> None:
        """Note that second moments have changed, or all state. Errors are kept, and pending steps forgotten."""
        self._ready, self.pending = False, None

    def _vector(self, names: tuple[str, ...], parameters: tuple[nn.Parameter, ...]) -> Vector:
        shapes = [shape_over(parameter, self.axis) for parameter in parameters]
        layout = vector_layout(tuple(shape.numel() for shape in shapes), self.size)
        return Vector(list(names), list(parameters), layout, shapes)

    def _prepare(self, state: State) -> None:
        """Set the masks from the second moments, and gather the momenta. Collective."""
        for vector in self.vectors:
            vector.mask = vector.layout.mask(self.mesh.device)
            if vector.errors is None:
                vector.errors = vector.layout.new(self.mesh.device)
            seconds = [self._gathered(each, state(each, "exp_avg_sq")) for each in vector.parameters]
            sharded = [
                [cut for cut in cuts(each) if not self.whole or cut.axis != self.axis] for each in vector.parameters
            ]
            roots = floored(seconds, sharded)
            for at, (view, parameter) in enumerate(zip(vector.views(vector.mask), vector.parameters, strict=True)):
                torch.ne(seconds[at], 0, out=view)
                self._roots[parameter] = roots[at].clamp_(min=1e-30)  # not 0, where all second moments are
                self._momenta[parameter] = self._gathered(parameter, state(parameter, "exp_avg")).mul_(view)
            vector.errors.mul_(vector.mask)
        self._ready = True

    def _gathered(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Return the part of a state tensor that is exchanged, from this rank's part `local`."""
        if not self.whole:
            return local
        shape = shape_over(parameter, self.axis)
        rows = -(-shape[0] // self.size)  # of all shards but the last, as torch.chunk has them
        sent = local.new_zeros(rows, *shape[1:])
        sent[: len(local)] = local
        received = local.new_empty(self.size * rows, *shape[1:])
        all_gather_single(received, sent, group=self.group)
        return received[: shape[0]].clone()

    def _own(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's shard of an exchanged tensor."""
        rows = -(-whole.shape[0] // self.size)
        return whole[self.lane * rows : (self.lane + 1) * rows]


def _tied(mesh: Mesh, names: list[str]) -> set[str]:
    """Return the names of parameters of which the pipeline's ranks hold more than one copy. Collective."""
    if mesh.size("pp") == 1:
        return set()
    stages = {mesh.layout.coordinate(rank, "pp"): held for rank, held in enumerate(gather_objects(mesh, names))}
    return {name for name, count in Counter(name for held in stages.values() for name in held).items() if count > 1}
