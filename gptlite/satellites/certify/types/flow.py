"""Types of all values of a running step, and its collectives, as torch's dispatcher sees them.

A value computed from others differs between the ranks along an axis if one of them does. Only collectives make it equal
again. That holds for every op, forward and backward, fused or not, so ops need no rules of their own; a few that move
several tensors through one buffer have them, so that the types of these tensors stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptlite.satellites.certify.types.atoms import Atoms
from gptlite.satellites.certify.types.values import SAME, ZERO, Span, ValueType, ValueTypes, joined
from gptlite.torch_private.dispatch import TorchDispatchMode
from gptlite.torch_private.ops import tree_leaves
from gptlite.torch_private.recording import ALL_GATHER, LOCAL_SCALAR, REDUCE_SCATTER, TO_COPY, op_name, op_schema
from gptlite.torch_private.simulation import held_messages, seen_reductions, shapes_unseen

ITEM = 1  # result of every `.item()`, as tensors have no values; 1 passes the pipeline stages' consistency check
SHAPES = {  # take only the shape of their tensor
    *("empty_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "ones_like", "full_like", "rand_like"),
}
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_"}
CAST = TO_COPY.overloadpacket.__name__
MOVES = {"copy_", CAST, "clone", "detach", "cat", "stack", "pow", "mul", "contiguous", "lift_fresh"}  # keep a 0
OVERWRITES = {"copy_", "zero_", "fill_"}
SCALES = {"mul", "mul_", "div", "div_"}
ORDERED = {"copy_", CAST, "clone"}  # elementwise, although torch does not tag them so


class Call(NamedTuple):
    """A collective: its kind, the atoms of its group, its operator, its bytes, where it was issued, the atoms along
    which parts of the tensor that it sums are equal, and not 0, the layer in whose forward pass it runs, whether an op
    with declared types issues it, and whether a pass gives it nothing but constant zeros."""

    kind: str
    atoms: int
    operator: str
    size: int
    where: str
    same: int = 0
    layer: str = ""
    declared: bool = False
    zero: bool = False


@dataclass
class Scope:
    """An op with declared types while it runs. `calls`: the collectives so far. `scales`: factors by which it has
    multiplied a tensor. `exact`: only its own collectives are in `calls`, not FSDP2's."""

    name: str
    calls: list[Call] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    exact: bool = False


class Flow(TorchDispatchMode):
    """Dispatch mode that types values, records collectives in `calls`, and reports what is wrong in `faults`.

    `where`: what runs now, for messages. `received`: types of the messages that a pipeline stage receives.
    """

    def __init__(self, atoms: Atoms) -> None:
        super().__init__()
        self.atoms, self.values = atoms, ValueTypes()
        self.calls: list[Call] = []
        self.faults: list[str] = []
        self.where, self.operator = "the step", "SUM"
        self.received: ValueType | None = None
        self.sent, self.passing = 0, False  # number of messages; whether forward and backward passes run
        self.owner: Callable[[], Scope | None] = lambda: None  # of a collective in the backward pass
        self.layer: Callable[[], str] = str  # whose forward pass runs
        self._sent, self._scopes = SAME, []
        self._scopes: list[Scope]
        self._groups: dict[str, int | None] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for patch in (shapes_unseen(), held_messages(), seen_reductions(lambda name: setattr(self, "operator", name))):
            self._open.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def fault(self, text: str) -> None:
        """Report a fault once."""
        if text not in self.faults:
            self.faults.append(text)

    @contextmanager
    def scope(self, scope: Scope) -> Iterator[Scope]:
        """Attribute the collectives of a `with` block to an op with declared types."""
        self._scopes.append(scope)
        try:
            yield scope
        finally:
            self._scopes.pop()

    def group_atoms(self, group: dist.ProcessGroup) -> int | None:
        """Return the atoms of a process group; None if it lacks ranks of an axis."""
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = self.atoms.of_group(group)
        return self._groups[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor runs ops on its local tensors, which are dispatched here in turn
        if func is LOCAL_SCALAR:
            return ITEM
        if func.namespace == "c10d":
            self._communicated(op_name(func), args)
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.prim.device.default:
            self._typed(func, args, kwargs or {}, out)
        return out

    # ---- ops -------------------------------------------------------------------------------------------------------

    def _typed(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name, of = op_name(func), self.values.of
        if func.namespace == "fsdp" and name in BUFFERED:
            BUFFERED[name](self, args, kwargs, out)
            return
        schema = op_schema(func).arguments
        written = [
            value
            for argument, value in zip(schema, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [value for key, value in kwargs.items() if key.startswith("out")]
        if name in SCALES:
            self._scaled(args)
        if name in ZEROS or name in SHAPES or name.startswith("empty"):
            self._give([*_tensors(written), *_tensors(out)], ZERO if name in ZEROS else SAME)
            return
        lists = [value for value in args if isinstance(value, list | tuple) and _tensors(value)]
        targets = _tensors(written) or _tensors(out)
        if name in ("cat", "stack") and not written and self._placed(args, out):
            return
        if lists and len(targets) > 1 and all(len(_tensors(each)) == len(targets) for each in _lists(written, out)):
            self._each(args, written, out)
            return
        sources = [each for each in _tensors([args, kwargs]) if name not in OVERWRITES or not _among(each, written)]
        if name in ORDERED and targets and any(map(self.values.in_bucket, sources)):
            self.values.mark_bucket(targets[0])
        elementwise = len(targets) == 1 and (torch.Tag.pointwise in func.tags or name in ORDERED)
        if elementwise and (spans := self._aligned(sources, targets[0])) is not None:
            self.values.set_spans(targets[0], spans)
            return
        kind = joined(map(of, sources))
        self._give([*_tensors(written), *_tensors(out)], kind if name in MOVES or not kind.zero else SAME)

    def _give(self, tensors: Iterable[Tensor], kind: ValueType) -> None:
        for tensor in tensors:
            self.values.set(tensor, kind)

    def _each(self, args: Any, written: Any, out: Any) -> None:
        """Type an op over lists of tensors that treats each of their places alone."""
        of, shared = self.values.of, joined(self.values.of(each) for each in args if isinstance(each, Tensor))
        lists = [_tensors(each) for each in args if isinstance(each, list | tuple)]
        targets = [*_lists(written, out)]
        count = len(_tensors(targets[0]))
        for place in range(count):
            kind = joined([shared, *(of(each[place]) for each in lists if len(each) == count)])
            self._give([_tensors(each)[place] for each in targets], kind)

    def _placed(self, args: Any, out: Tensor) -> bool:
        """Type the parts of a tensor that consists of others, one after the other. Return False if it does not."""
        parts, dim = args[0], args[1] if len(args) > 1 else 0
        if dim not in (0, -out.dim()) or len({self.values.of(each) for each in parts}) == 1:
            return False
        spans, begin = [], 0
        for part in parts:
            end = begin + part.numel() * out.element_size()
            if part.is_contiguous() and part.element_size() == out.element_size():
                spans += [(begin + first, begin + last, kind) for first, last, kind in self.values.spans(part)]
            else:
                spans.append((begin, end, self.values.of(part)))
            begin = end
        self.values.set_spans(out, spans)
        return True

    def _aligned(self, sources: Sequence[Tensor], out: Tensor) -> list[Span] | None:
        """Return the types of the ranges of an elementwise result whose inputs have several; None for other inputs."""
        if not out.is_contiguous() or not any(len(self.values.spans(each)) > 1 for each in sources):
            return None
        spans: list[Span] = [(0, out.nbytes, SAME)]
        for source in sources:
            if source.numel() == 1 or not source.is_contiguous() or source.numel() != out.numel():
                own = [(0, out.nbytes, self.values.of(source))]
            else:
                ratio = out.element_size() / source.element_size()
                own = [(int(a * ratio), int(b * ratio), kind) for a, b, kind in self.values.spans(source)]
            spans = _overlaid(spans, own)
        return spans

    def _scaled(self, args: Any) -> None:
        """Note a multiplication by a number inside an op with declared types, and report one of a gradient bucket."""
        factor = next((each for each in args if isinstance(each, int | float) and each != 1), None)
        if factor is None:
            return
        if self._scopes:
            self._scopes[-1].scales.append(factor)
        elif self.passing and any(map(self.values.in_bucket, _tensors(args))):
            self.fault(f"{self.where}: gradients are scaled by {factor:g} while they are summed over the data ranks")

    # ---- collectives -----------------------------------------------------------------------------------------------

    def _communicated(self, name: str, args: Any) -> None:
        kind, tensor, source, place = _parsed(name, args)
        if kind is None:
            return
        group = dist.ProcessGroup.unbox(args[place])
        atoms = self.group_atoms(group)
        if kind == "send":
            self._sent = self.values.of(tensor)
            self.sent += 1
            if self.received is not None:
                self._sends(tensor)
            return
        if kind == "recv":
            self.values.set(tensor, self.received if self.received is not None else self._sent)
            return
        if group.size() == 1:
            if source is not None:
                self.values.set(tensor, self.values.of(source))
            return
        if atoms is None:
            self.fault(f"{self.where}: {kind} over {group.size()} ranks, which are not all ranks of an axis")
            return
        before = self.values.spans(tensor if source is None else source)
        operator = self.operator if "reduce" in kind else ""
        self.operator = "SUM"
        same = 0
        if operator in ("SUM", "AVG", "PREMUL_SUM"):
            for _, _, part in before or [(0, 0, SAME)]:
                same |= 0 if part.zero else atoms & ~part.varies
        size, declared = (tensor if source is None else source).nbytes, bool(self._scopes)
        counts = self.passing and (declared or "reduce" in kind)  # FSDP2 gathers shards that are padding
        zero = counts and bool(before) and all(part.zero for _, _, part in before)
        call = Call(kind, atoms, operator, size, self.layer() or self.where, same, self.layer(), declared, zero)
        self.calls.append(call)
        for scope in (self._scopes[-1] if self._scopes else None, self.owner()):
            if scope is not None:
                scope.calls.append(call)
        if operator not in ("", "SUM") and self.values.in_bucket(tensor if source is None else source):
            axes = self.atoms.words(atoms)
            self.fault(f"{self.where}: {kind} over {axes} takes the {operator} of gradients, expected their SUM")
        EFFECTS[kind](self, tensor, source, atoms, before)

    def _sends(self, tensor: Tensor) -> None:
        extra = self.values.of(tensor).varies & ~(self.received or SAME).varies
        if extra:
            axes = self.atoms.words(extra)
            self.fault(f"{self.where}: what it sends to another pipeline stage differs over {axes}, expected the same")

    def _reduced(self, tensor: Tensor, _: Any, atoms: int, before: list[Span]) -> None:
        self.values.set_spans(tensor, [(a, b, kind.equal_over(atoms)) for a, b, kind in before]) if before else None

    def _gathered(self, tensor: Tensor, source: Tensor, atoms: int, before: list[Span]) -> None:
        spans = [(a, b, kind.equal_over(atoms)) for a, b, kind in before] or [(0, source.nbytes, SAME)]
        if len(spans) > 1:
            self.values.set_spans(tensor, spans, period=source.nbytes)
        else:
            self.values.set(tensor, spans[0][2])

    def _scattered(self, tensor: Tensor, source: Tensor, atoms: int, before: list[Span]) -> None:
        storage = self.values.row(source)
        spans = storage if storage is not None else [(0, tensor.nbytes, joined(kind for _, _, kind in before))]
        self.values.set_spans(tensor, [(a, b, kind.summed_over(atoms)) for a, b, kind in spans])
        if self.values.in_bucket(source):
            self.values.mark_bucket(tensor)

    def _exchanged(self, tensor: Tensor, source: Tensor, atoms: int, before: list[Span]) -> None:
        kind = joined(each for _, _, each in before)
        self.values.set(tensor, ValueType(kind.varies | atoms, kind.unsummed | (atoms & ~kind.varies)))

    # ---- FSDP2's buffers -------------------------------------------------------------------------------------------

    def _copied_in(self, args: Any, kwargs: Any, out: Any) -> None:
        begin, spans = 0, []
        for each in args[0]:
            spans += [(begin + a, begin + b, kind) for a, b, kind in self.values.spans(each)]
            begin += each.nbytes
        self.values.set_spans(out[0], spans)

    def _copied_out(self, args: Any, kwargs: Any, out: Any) -> None:
        whole, sizes = args[0], args[1]
        row = self.values.row(whole) or [(0, whole.nbytes // max(1, len(whole)), self.values.of(whole))]
        begin = 0
        for size, target in zip(sizes, kwargs["out"], strict=True):
            end = begin + size * whole.element_size()
            self.values.set(target, joined(kind for a, b, kind in row if a < end and b > begin))
            begin = end

    def _chunked(self, args: Any, kwargs: Any, out: Any) -> None:
        tensors, chunks, target = args[0], args[2], kwargs["out"]
        begin, spans = 0, []
        for each in tensors:
            rows = -(-len(each) // chunks)
            end = begin + rows * (each.numel() // max(1, len(each))) * target.element_size()
            spans.append((begin, end, self.values.of(each)))
            begin = end
        self.values.set_spans(target, spans, period=begin)
        self.values.mark_bucket(target)


BUFFERED = {
    "all_gather_copy_in": Flow._copied_in,
    "split_with_sizes_copy": Flow._copied_out,
    "chunk_cat": Flow._chunked,
    "chunk_cat_mixed_dtype": Flow._chunked,  # torch 2.15
}
EFFECTS = {
    "all_reduce": Flow._reduced,
    "broadcast": Flow._reduced,
    "all_gather": Flow._gathered,
    "reduce_scatter": Flow._scattered,
    "all_to_all": Flow._exchanged,
}
KINDS = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", "alltoall_base_": "all_to_all"}
IN_PLACE = {"allreduce_": "all_reduce", "broadcast_": "broadcast", "send": "send", "recv_": "recv"}


def _parsed(name: str, args: Any) -> tuple[str | None, Any, Any, int]:
    """Return a collective's kind, the tensor that it writes, that which it reads if it is another, and the place of the
    process group among its arguments."""
    if name in KINDS:
        return KINDS[name], args[0], args[1], 2
    if name in IN_PLACE:
        return IN_PLACE[name], args[0][0], None, 1
    return None, None, None, 0


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _lists(written: Any, out: Any) -> list[Any]:
    """Return the lists of tensors that an op writes or returns."""
    found = [each for each in written if isinstance(each, list | tuple)]
    return found or ([out] if isinstance(out, list | tuple) else [])


def _among(tensor: Tensor, written: Any) -> bool:
    return any(tensor is each for each in _tensors(written))


def _overlaid(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return the ranges of two results of the same size together."""
    borders = sorted({each for a, b, _ in (*spans, *others) for each in (a, b)})
    out = []
    for begin, end in pairwise(borders):
        kinds = [kind for a, b, kind in (*spans, *others) if a <= begin and b >= end]
        out.append((begin, end, joined(kinds)))
    return out
