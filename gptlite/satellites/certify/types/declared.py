"""Declared types of ops with collectives, and the collectives that they call for.

An autograd function or a layer declares the type change of its collective over its own axis in the annotation of its
result, such as

    def forward(ctx, x: Tensor, axis: TensorAxis) -> Annotated[Tensor, "I -> R"]:

The types are those of spmd-types (meta-pytorch). R: the same on all ranks, with a partial gradient; I: the same on all
ranks, as is its gradient; V: different; P: a part of a sum; S(dim): a shard along a dim. The gradient of R is P and the
other way round; those of I, V and S have their own type. So one line says what both passes have to communicate:

| from, to   | collective     |
|------------|----------------|
| P -> I, R  | all_reduce     |
| P -> S     | reduce_scatter |
| S -> I, R  | all_gather     |
| S -> S     | all_to_all     |
| else       | none           |

Under sequence parallelism, I, between layers, is S(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd import Function

DUAL = {"R": "P", "P": "R", "I": "I", "V": "V", "S": "S"}
CALLS = {
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "I"): "all_gather",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
}
SUMS = ("all_reduce", "reduce_scatter")
ANNOTATION = re.compile(r"^Annotated\[.*, [\"'](\S+ -> \S+)[\"']\]$")
FORM = re.compile(r"(R|I|V|P|S\(-?\d\)) -> (R|I|V|P|S\(-?\d\))")

Declarations = dict[tuple[type, str], str]  # what a method of a class declares


@dataclass(frozen=True)
class Declared:
    """Type change of an op over its axis, each type a letter of DUAL."""

    before: str
    after: str

    @classmethod
    def of(cls, text: str, sequence: bool = False) -> Declared:
        """Read a declaration, for sequence parallelism if `sequence` is True. Raises ValueError for another form."""
        match = FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"types={text!r} is not of the form 'P -> S(1)', with the types R, I, V, P and S(dim)")
        before, after = (each[0] for each in match.groups())
        sliced = {"I": "S"} if sequence else {}
        return cls(sliced.get(before, before), sliced.get(after, after))

    @property
    def forward(self) -> str:
        """Collective of the forward pass, empty for none."""
        return CALLS.get((self.before, self.after), "")

    @property
    def backward(self) -> str:
        """Collective of the backward pass, empty for none."""
        return CALLS.get((DUAL[self.after], DUAL[self.before]), "")

    @property
    def gradient(self) -> str:
        """Type of the gradient that the backward pass returns."""
        return DUAL[self.before]

    def fault(self, calls: list[str], backward: bool) -> str:
        """Return what is wrong with an op's collectives over its axis in a pass; empty if nothing is.

        Gathers beyond the declared one are allowed, such as that of an input that was not saved: they add nothing up.
        """
        wanted = self.backward if backward else self.forward
        change = f"{DUAL[self.after]} -> {DUAL[self.before]}" if backward else f"{self.before} -> {self.after}"
        sums, expected = [call for call in calls if call in SUMS], [wanted] if wanted in SUMS else []
        if sums == expected and (wanted in SUMS or not wanted or wanted in calls):
            return ""
        return f"{change} needs {wanted or 'no sum'}"


def declarations() -> Declarations:
    """Return what all loaded classes declare, plug-ins' among them: `{(class, method): text}`."""
    found = {(cls, name): _text(method) for cls in _classes() for name, method in vars(cls).items()}
    return {key: text for key, text in found.items() if text}


def _text(method: Any) -> str:
    """Return the declaration in the annotation of a method's result; empty without one."""
    returned = getattr(getattr(method, "__func__", method), "__annotations__", {}).get("return")
    if isinstance(returned, str):
        match = ANNOTATION.search(returned)
        return match[1] if match else ""
    notes = getattr(returned, "__metadata__", ())
    return next((each for each in notes if isinstance(each, str) and " -> " in each), "")


def _classes() -> Iterator[type]:
    left: list[type] = [Function, nn.Module]
    while left:
        cls = left.pop()
        if cls.__module__.partition(".")[0] != "torch":
            yield cls
        left += cls.__subclasses__()
