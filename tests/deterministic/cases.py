"""Bits of the first steps of a run, on any layout, and faults planted in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch
from distributed.cells.layouts import BASE
from torch import Tensor

from gptlite.config import load
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.reduction import Reduction
from gptlite.satellites.deterministic import reduction
from gptlite.satellites.deterministic.reduction import ExactReduction
from gptlite.satellites.parity.record import StepRecord, recorded

ON = [*BASE, "precision=fp32", "parallelism.deterministic=true", "model.num_layers=2", "data.global_batch_size=24"]
STEPS = 3
Bits = dict[str, str]  # of a step's loss, gradient norm, and all gradients, values and buffers


def steps(words: list[str], fault: str = "") -> list[Bits]:
    """The bits of the first steps; none on ranks other than 0. Fails if ranks differ in loss or norm."""
    config = load(words)
    mesh = build_mesh(config.parallelism)
    try:
        with FAULTS[fault]():
            return [bits(each) for each in recorded(config, STEPS, mesh) if each is not None]
    finally:
        mesh.close()


def bits(record: StepRecord) -> Bits:
    assert len(set(record.reports)) == 1
    found = {"loss": record.loss.hex(), "gradient norm": record.grad_norm.hex()}
    tensors = {"gradient": record.gradients, "value": record.values, "buffer": record.buffers}
    for kind, named in tensors.items():
        for name, whole in named.items():
            assert not whole.disagreements, name
            found[f"{kind} {name}"] = hashlib.sha256(whole.value.numpy().tobytes()).hexdigest()
    return found


def difference(ours: list[Bits], theirs: list[Bits]) -> str:
    """The first thing that differs, with its step; "" for equal bits."""
    assert len(ours) == len(theirs) == STEPS
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert mine.keys() == other.keys()
        if found := [name for name in mine if mine[name] != other[name]]:
            return f"step {step}: {found[0]} and {len(found) - 1} more"
    return ""


@contextmanager
def _none() -> Iterator[None]:
    yield


def _float_sums() -> AbstractContextManager[object]:
    def add(sums: Tensor, x: Tensor, unit: float) -> None:
        sums[:, 0] = (sums[:, 0].float() + x).double()

    return mock.patch.object(reduction, "add", add)


def _float_norm() -> AbstractContextManager[object]:
    def square(self: ExactReduction, counted: Collection[Tensor], dense: Callable[[], Tensor]) -> Tensor:
        return dense()

    return mock.patch.object(ExactReduction, "gradient_square", square)


def _float_loss() -> AbstractContextManager[object]:
    exact = ExactReduction.complete

    def complete(self: ExactReduction, losses: list[Tensor], zero: Tensor) -> Tensor:
        exact(self, losses, zero)
        return Reduction.complete(self, losses, zero)

    return mock.patch.object(ExactReduction, "complete", complete)


def _four_samples() -> AbstractContextManager[object]:
    from gptlite.trainer import build

    inner = build.build_loader
    return mock.patch.object(build, "build_loader", lambda *args: inner(*args[:4], ParallelismConfig()))  # pyright: ignore[reportCallIssue]


def _rounded_twice() -> AbstractContextManager[object]:
    """Each rank rounds its own sum before the ranks' sums are added."""
    inner = reduction._scattered

    def scattered(sums: Tensor, group: object) -> Tensor:
        sums[:, 0], sums[:, 1] = reduction.rounded(sums.transpose(0, 1)).double(), torch.zeros(())
        return inner(sums, group)  # type: ignore[arg-type]

    return mock.patch.object(reduction, "_scattered", scattered)


# Each leaves one sum in floating point, or a pass of several samples.
FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": _none,
    "float sums": _float_sums,
    "float norm": _float_norm,
    "float loss": _float_loss,
    "four samples": _four_samples,
    "rounded twice": _rounded_twice,
}
