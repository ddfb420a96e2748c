"""A stand-in for CUDA's capture on any device: records ops with their memory, and executes them again in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

# The host waits for the device in them; a capture refuses them.
READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


class Uncaptured(RuntimeError):
    """Raised for an op that reads a value on the host."""


@dataclass(frozen=True)
class Op:
    """An op with its arguments, and those of its results whose memory it allocated."""

    func: Any
    args: Any
    kwargs: Any
    made: list[Tensor]

    def __call__(self) -> None:
        """Execute it again, into the same memory."""
        made = iter(self.made)
        for out in tree_leaves(self.func(*self.args, **self.kwargs)):
            if isinstance(out, Tensor) and not _is_one_of(out, _tensors((self.args, self.kwargs))):
                next(made).copy_(out)


@dataclass(eq=False)
class Tape(TorchDispatchMode):
    """While entered, records ops. Every tensor stays alive, so that no address means two tensors."""

    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in READS:
            raise Uncaptured(f"the host reads a value by {func}")
        inputs = _tensors((args, kwargs))
        out = func(*args, **kwargs)
        made = [each for each in _tensors(out) if not _is_one_of(each, inputs)]
        self.ops.append(Op(func, args, kwargs, made))
        return out

    def replay(self) -> None:
        """Execute all ops again. Versions of tensors stay as they are, as in a replay on a GPU."""
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            for op in self.ops:
                if not op.func.is_view:
                    op()

    def outside(self) -> list[int]:
        """Return the addresses of the tensors that the ops take from outside the tape, in the order of their use."""
        known: set[int] = set()
        addresses: dict[int, None] = {}
        for op in self.ops:
            for each in _tensors((op.args, op.kwargs)):
                if _address(each) not in known:
                    addresses[_address(each)] = None
            known |= {_address(each) for each in op.made}
        return list(addresses)


class TapeRecorder:
    """Recorder of tapes (graph/recorder.py)."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def warm(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        tape = Tape()
        with tape:
            result = function()
        self.tapes.append(tape)
        executed = False

        def replay() -> None:
            nonlocal executed
            if executed:  # the first time, recording has executed it
                tape.replay()
            executed, self.replays = True, self.replays + 1

        return result, replay


def differing(first: Tape, second: Tape) -> list[str]:
    """Return where two steps differ in more than the values of tensors: ops, other arguments, memory from outside."""
    lines = [] if len(first.ops) == len(second.ops) else [f"{len(first.ops)} and {len(second.ops)} ops"]
    for one, other in zip(first.ops, second.ops, strict=False):
        if (a := _arguments(one)) != (b := _arguments(other)):
            lines.append(f"{a} and {b}")
    if first.outside() != second.outside():
        lines.append(f"outside: {len(first.outside())} and {len(second.outside())} tensors, or others")
    return lines


def _arguments(op: Op) -> list[Any]:
    """Return an op's name, its arguments that are no tensors, and the shapes and strides of those that are."""
    leaves, spec = tree_flatten((op.args, op.kwargs))
    return [str(op.func), [_comparable(leaf) for leaf in leaves], str(spec)]


def _comparable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf) if isinstance(leaf, torch.ScriptObject) else leaf  # the profiler's records of a range


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_one_of(tensor: Tensor, others: list[Tensor]) -> bool:
    return _address(tensor) in {_address(each) for each in others}
