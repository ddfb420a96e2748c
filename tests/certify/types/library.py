"""The declarations, held against spmd-types (meta-pytorch): a test of the declarations, and of our own flow of types.

`numerically_right` runs a function's passes on simulated ranks, and compares the numbers with what the declared types
say. `forward_types` types a model's forward pass over the tensor axis with the library's rules for all ops of torch. It
is no substitute for `flow.py`: it sees no backward pass, no FSDP2 and no custom op, and needs a rule for each autograd
function. The product does not need the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import spmd_types.checker
import torch
from spmd_types import rulecheck as numeric
from spmd_types import rules
from torch import Tensor

from gptlite.models.model import Model
from gptlite.models.parallelize import materialize
from gptlite.ops import cross_entropy
from gptlite.ops.inputs import Inputs
from gptlite.parallelism import tensor
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.layout import Layout
from gptlite.satellites.certify.types.declared import DUAL, Declarations
from gptlite.satellites.plan.simulate import CPU, mesh_of, ops_of, policy_of, zero_batch
from gptlite.satellites.plan.workload import Workload
from gptlite.trainer.parts import build_parts

spmd: Any = spmd_types  # its stubs export no name
PLAIN = {"R": spmd.R, "I": spmd.I, "V": spmd.V, "P": spmd.P}


def numerically_right(cls: type, text: str, x: Tensor) -> None:
    """Check both passes of an autograd function of a tensor x and an axis on two simulated ranks.

    Raises RuleCheckError if the numbers are not those that the declaration `text` says, SpmdTypeError if the library
    has no such type change.
    """
    before, after = text.split(" -> ")
    back = tuple(f"{DUAL[each[0]]}{each[1:]}" if each[0] in "RP" else each for each in (after, before))
    for (source, target), backward in (((before, after), False), (back, True)):
        made = _function(cls, source, target, backward)
        with patch.object(numeric, "_seeded_noise", _noise):  # the library's needs an op that CPUs lack in torch 2.13
            placements: Any = {"x": {"tp": _type(source)}}
            numeric.rulecheck(made, (x, "tp"), placements, mesh={"tp": 2}, local_tensor_mode=True)


def forward_types(work: Workload, rank: int, declared: Declarations) -> Any:
    """Return the library's type of the loss over the tensor axis, from a forward pass of a rank without ZeRO.

    Raises SpmdTypeError for a forward pass in which types do not fit, such as a sum that is missing.
    """
    with mesh_of(work.layout, rank) as mesh, ExitStack() as stack:
        for (cls, _), text in declared.items():
            if issubclass(cls, torch.autograd.Function) and cls.__module__ == tensor.__name__:
                hook = _weighted(text) if cls is tensor._OverlappedColumn else _alone(text)
                stack.enter_context(patch.object(cls, "spmd_typecheck", staticmethod(hook), create=True))
        stack.enter_context(_loss_rule())
        model = Model.of(work.model, policy_of(work))
        alone = replace(mesh, layout=Layout((1, 1, 1, work.layout.size("tp"))))
        (part,) = build_parts(
            model, replace(work.parallelism, zero=0, pipeline=1), alone, policy_of(work), ops_of(work)
        )
        materialize(model, [part], CPU)
        for cls in _local_functions({cls for cls, _ in declared}):
            spmd.register_local_autograd_function(cls)
        axis = mesh.group("tp")
        of_heads = (module for module in part.modules() if getattr(module, "of_heads", False) is True)
        summed = part.parameters() if work.parallelism.sequence else (p for each in of_heads for p in each.parameters())
        partial = set(map(id, summed))  # their gradients are summed after the passes
        x, targets = zero_batch(work)
        with spmd.set_current_mesh(mesh.along("tp")), spmd.checker.typecheck():
            for parameter in part.parameters():
                kind = spmd.R if id(parameter) in partial else spmd.I
                spmd.assert_type(local_tensor(parameter), {axis: spmd.V if tensor.is_cut(parameter) else kind})
            for each in (x, targets):
                spmd.assert_type(each, {axis: spmd.I})
            loss = model.forward(part, x, Inputs(targets, torch.zeros(len(x), dtype=torch.int64), None, 1.0))
            return spmd.get_axis_local_type(loss, axis)


def _type(text: str) -> Any:
    return spmd.S(int(text[2:-1])) if text.startswith("S") else PLAIN[text]


def _rule(x: Any, group: Any, text: str, given: str = "") -> Any:
    """Return the library's type after a declared change; `given` replaces the type before it."""
    before, after = text.split(" -> ")
    source, target = _type(given or before), _type(after)
    if before == "P":
        reduce = rules.all_reduce if after in "RI" else rules.reduce_scatter
        return reduce(x, group, src=source, dst=target)
    if before.startswith("S"):
        return rules.all_gather(x, group, src=source, dst=target)
    return rules.reinterpret(x, group, src=source, dst=target)


def _alone(text: str) -> Callable[..., Any]:
    """Return the rule of a function of a tensor. A product with a shard of a weight has type V: that it is a part of a
    sum is what the function claims."""

    def spmd_typecheck(*, x: Any, axis: Any) -> Any:
        return _rule(x, axis.group, text, "V" if text.startswith("P") else "")

    return spmd_typecheck


def _weighted(text: str) -> Callable[..., Any]:
    """Return the rule of a function that multiplies its input with a shard of a weight."""

    def spmd_typecheck(*, x: Any, weight: Any, axis: Any) -> Any:
        rules.ignore(weight)
        entered = _rule(x, axis.group, "S(1) -> R" if axis.sequence else text)
        return rules.reinterpret(entered, axis.group, src=spmd.R, dst=spmd.V)

    return spmd_typecheck


@contextmanager
def _loss_rule() -> Iterator[None]:
    """Context manager with the rule of the vocabulary-parallel loss, whose collectives are inside its function."""

    def spmd_typecheck(*, hidden: Any, weight: Any, targets: Any, loss: Any, shared: Any) -> Any:
        rules.ignore(weight, targets)
        return rules.einsum("nd->", hidden)

    with patch.object(cross_entropy._LinearCrossEntropy, "spmd_typecheck", staticmethod(spmd_typecheck), create=True):
        yield


def _local_functions(others: set[type]) -> list[type]:
    """Return our autograd functions without collectives."""
    found = torch.autograd.Function.__subclasses__()
    ours = [cls for cls in found if cls.__module__.startswith("gptlite.") and not cls.__module__.endswith("batch_norm")]
    return [cls for cls in ours if cls not in others and cls is not cross_entropy._LinearCrossEntropy]


class _Context(SimpleNamespace):
    """Context of an autograd function outside a graph."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _function(cls: Any, source: str, target: str, backward: bool) -> type:
    """Return a function that is one pass of another, with the rule of its type change."""

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            axis = SimpleNamespace(group=group, size=group.size())
            return cls.backward(_Context(axis=axis), x)[0] if backward else cls.forward(_Context(), x, axis)

        @staticmethod
        def spmd_typecheck(*, x: Any, group: Any) -> Any:
            return _rule(x, group, f"{source} -> {target}")

    return Pass


def _noise(like: Tensor, *key: object) -> Tensor:
    generator = torch.Generator().manual_seed(len(repr(key)))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)
