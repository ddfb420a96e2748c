"""Hooks on a model's blocks and on the ops that declare types, which hold what runs against the declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlite.parallelism.axes import DATA_AXES
from gptlite.satellites.certify.types.declared import SUMS, Declarations, Declared
from gptlite.satellites.certify.types.flow import Flow, Scope
from gptlite.torch_private.ops import tree_leaves
from gptlite.torch_private.recording import current_node

SCOPE = "scope of gptlite's types"  # key of a graph node's metadata


class OpHooks:
    """Hooks on a rank's parts that hold `declared` in both passes, and activations between blocks against their type:
    slices of the sequence if `sequence` is True. `mixed`: messages between stages hold more than activations."""

    def __init__(self, flow: Flow, declared: Declarations, sequence: bool, mixed: bool) -> None:
        self.flow, self.declared, self.sequence = flow, declared, sequence
        self.tensor, self.mixed, self.holes = flow.atoms.along("tp"), mixed, set[str]()
        self._modules: list[str] = []
        self._ends: set[str] = set()  # first and last blocks of parts
        self._shape, self._first = (
            torch.Size(),
            "",
        )  # of a block's input; the first layer with such a result that differs
        self._awaiting: list[tuple[str, Declared, int, Scope]] = []
        flow.owner, flow.layer = self._owner, lambda: self._modules[-1] if self._modules else ""

    # ---- ops that declare types ------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, parts: list[nn.Module], blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Context manager in which declared functions, the layers of parts, and blocks are watched."""
        with ExitStack() as stack:
            for (cls, method), text in self.declared.items():
                if issubclass(cls, torch.autograd.Function):
                    for name in ("forward", "backward"):
                        watched = staticmethod(self._function(cls, text, name))
                        stack.enter_context(patch.object(cls, name, watched))
                else:
                    stack.enter_context(patch.object(cls, method, self._method(getattr(cls, method), text)))
            for part in parts:
                for name, module in part.named_modules():
                    self._name(name, module)
                held = [name for name, _ in part.named_modules() if name in blocks]
                self._ends.update(held[:1], held[-1:])
            for name, block in blocks.items():
                self._block(name, block)
            yield

    def _function(self, cls: type, text: str, name: str) -> Callable[..., Any]:
        """Return a pass of an autograd function that compares its collectives with the declaration."""
        call, back = getattr(cls, name), name == "backward"

        @wraps(call)
        def run(ctx: Any, *args: Any) -> Any:
            atoms = self._axis_atoms((*args, *vars(ctx).values()) if hasattr(ctx, "__dict__") else args)
            scope = Scope(f"{self._here()}: {cls.__name__}.{name}", exact=True)
            with self.flow.scope(scope):
                out = call(ctx, *args)
            declared = Declared.of(text, self.sequence and cls.__module__.endswith("tensor"))
            self._hold(scope, declared, atoms, back)
            after = declared.gradient if back else declared.after
            # A function with a weight declares what it does to its input, before it multiplies.
            alone = back or sum(isinstance(each, Tensor) for each in args) == 1
            if atoms and alone and after in "RI":
                first = next((each for each in tree_leaves(out) if isinstance(each, Tensor)), None)
                if first is not None and (left := self.flow.values.of(first).varies & atoms):
                    self.flow.fault(
                        f"{scope.name}: expected {after} over {self.flow.atoms.words(atoms)}, "
                        f"found V over {self.flow.atoms.words(left)}"
                    )
            return out

        return run

    def _method(self, call: Callable[..., Any], text: str) -> Callable[..., Any]:
        """Return a layer's method that compares the collectives of both its passes with the declaration."""

        @wraps(call)
        def run(module: Any, x: Tensor, *args: Any, **options: Any) -> Any:
            declared, atoms = Declared.of(text, self.sequence), self._axis_atoms(vars(module).values())
            scope = Scope(f"{self._here()}: {type(module).__name__}")
            before = len(self.flow.calls)
            with self.flow.scope(scope):
                out = call(module, x, *args, **options)
            scope.calls = self.flow.calls[before:]  # those of the functions that it calls among them
            self._hold(scope, declared, atoms, False)
            back = Scope(f"{self._here()}: {type(module).__name__}, backward")
            if atoms and isinstance(out, Tensor) and out.grad_fn is not None:
                stop = x.grad_fn if isinstance(x, Tensor) else None
                if _tag(out.grad_fn, stop, back) and (stop is not None or (isinstance(x, Tensor) and x.requires_grad)):
                    held: list[None] = []

                    def begins(_: Tensor) -> None:
                        if not held:
                            held.append(None)
                            self._awaiting.append((back.name, declared, atoms, back))

                    out.register_hook(begins)
            return out

        return run

    def finish(self) -> None:
        """Compare the collectives of all backward passes of layers with their declarations, after a step."""
        for _, declared, atoms, scope in self._awaiting:
            self._hold(scope, declared, atoms, True)
        axes, data = self.flow.atoms.words, self.flow.atoms.along(*DATA_AXES)
        for call in self.flow.calls:
            if not call.declared and call.layer and call.kind in (*SUMS, "all_to_all") and call.atoms & ~data:
                self.holes.add(f"{call.layer}: {call.kind} over {axes(call.atoms)}, by no op with declared types")

    def _hold(self, scope: Scope, declared: Declared, atoms: int, back: bool) -> None:
        """Report how an op's collectives in a pass differ from those that its declaration needs over its axis."""
        if not atoms:
            return
        axis = self.flow.atoms.words(atoms)
        mine = [call for call in scope.calls if call.atoms == atoms]
        text = declared.fault([call.kind for call in mine], back)
        if not text and not back and len(mine) < len(scope.calls) and scope.exact:
            text = f"{declared.before} -> {declared.after} needs nothing over other axes"
        if text:
            calls = [f"{call.kind} over {self.flow.atoms.words(call.atoms)}" for call in scope.calls]
            self.flow.fault(f"{scope.name}: over {axis}, {text}, found {' and '.join(calls) or 'none'}")
        for call in mine:
            if call.operator not in ("", "SUM"):
                self.flow.fault(f"{scope.name}: {call.kind} over {axis} takes {call.operator}, expected SUM")
        if scope.scales:
            self.flow.fault(f"{scope.name}: multiplies by {scope.scales[0]:g}, which no type does")

    def _axis_atoms(self, values: Any) -> int:
        """Return the atoms of the first axis or group among some values; 0 without one."""
        for value in values:
            group = value if isinstance(value, dist.ProcessGroup) else getattr(value, "group", None)
            if isinstance(group, dist.ProcessGroup):
                return self.flow.group_atoms(group) or 0
        return 0

    def _owner(self) -> Scope | None:
        if self._modules:  # also when a block is recomputed in the backward pass
            return None
        node = current_node()
        return None if node is None else node.metadata.get(SCOPE)

    def _here(self) -> str:
        return self._modules[-1] if self._modules else self.flow.where

    # ---- layers and blocks -----------------------------------------------------------------------------------------

    def _name(self, name: str, module: nn.Module) -> None:
        """Let a module's name appear in messages while it runs."""

        def enters(*_: Any) -> None:
            self._modules.append(name or "the model")

        def leaves(_: nn.Module, args: Any, out: Any) -> None:
            self._modules.pop()
            like = isinstance(out, Tensor) and out.shape == self._shape and not self._first
            if like and self.flow.values.of(out).varies & self.tensor:
                self._first = name

        module.register_forward_pre_hook(enters, prepend=True)
        module.register_forward_hook(leaves, always_call=True)

    def _block(self, name: str, block: nn.Module) -> None:
        """Hold a block's activations and their gradients against the type between blocks."""

        def enters(_: nn.Module, args: Any, options: Any) -> None:
            x = next((each for each in args if isinstance(each, Tensor)), None)
            if (
                self.mixed
                and x is not None
                and name in self._ends
                and (kind := self.flow.values.of(x)).varies & self.tensor
            ):
                self.flow.values.set(x, kind.equal_over(self.tensor))
                self.holes.add("activations that a stage receives with the first layer's values: taken to be I")
            self.flow.where, self._first, self._shape = name, "", torch.Size() if x is None else x.shape
            if x is not None and x.requires_grad:
                x.register_hook(lambda grad: self._between(grad, f"{name}, backward: the gradient of its input"))

        def begins(grad: Tensor) -> Tensor | None:
            self.flow.where = f"{name}, backward"
            kind = self.flow.values.of(grad)
            if not self.mixed or name not in self._ends or grad.is_contiguous() or not kind.varies & self.tensor:
                return None
            own = grad.contiguous()  # a view of the message from the next stage
            self.flow.values.set(own, kind.equal_over(self.tensor))
            return own

        def leaves(_: nn.Module, args: Any, options: Any, out: Any) -> None:
            x = next((each for each in args if isinstance(each, Tensor)), None)
            tensors = (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            stream = next((leaf for leaf in tensors if x is not None and leaf.shape == x.shape), None)
            if stream is not None:
                self._between(stream, f"{self._first or name}: its output")
                if stream.requires_grad:
                    stream.register_hook(begins)

        block.register_forward_pre_hook(enters, prepend=True, with_kwargs=True)
        block.register_forward_hook(leaves, with_kwargs=True)

    def _between(self, tensor: Tensor, what: str) -> None:
        varies = self.flow.values.of(tensor).varies & self.tensor
        if varies and not self.sequence:
            self.flow.fault(f"{what} differs over tp, expected I: the same on all its ranks; a sum is missing")
        elif self.tensor and not varies and self.sequence:
            self.flow.fault(f"{what} is the same on all ranks of tp, expected S(1): a slice of the sequence")


def _tag(node: Any, stop: Any, scope: Scope) -> bool:
    """Mark the graph nodes from `node` back to `stop`, which is not marked. Return False if there are too many."""
    seen, left = {stop, None}, [node]
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        current.metadata[SCOPE] = scope
        if len(seen) > 1000:
            return False
        left += [following for following, _ in current.next_functions]
    return True
