"""Functions that ranks run: steps compared with one process, sizes of blocks' outputs, and a run that may be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gptlite.config.schema import Config
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.mesh import build_mesh
from gptlite.precision import Precision, PrecisionConfig
from gptlite.pretrain import pretrain
from gptlite.satellites.parity.compare import StepComparison, Tolerances
from gptlite.satellites.parity.record import build, recorded
from gptlite.satellites.parity.worker import compared, limits_of, save_reference
from gptlite.trainer.attached import Attached
from gptlite.trainer.observers import Observer


@dataclass(frozen=True)
class Compared:
    """Steps of a layout, compared with those of one process within `limits` (loss, gradient norm)."""

    steps: tuple[StepComparison, ...]
    limits: tuple[float, float]


def reference(config: Config, folder: str, steps: int) -> None:
    """Record the first steps of one process in `folder`; in 16-bit precision also their distances from fp32."""
    exact = None
    if config.precision.dtype is not Precision.fp32:
        exact = _steps(replace(config, precision=PrecisionConfig(Precision.fp32)), steps)
    save_reference(Path(folder), _steps(config, steps), exact)


def _steps(config: Config, steps: int) -> Iterator[Any]:
    return (step for step in recorded(config, steps) if step is not None)


def compare(config: Config, folder: str) -> Compared | None:
    """Compare the steps of this layout with those recorded in `folder`. Returns None on ranks other than 0."""
    mesh = build_mesh(config.parallelism)
    limits: Tolerances = limits_of(Path(folder), config, mesh)
    steps = tuple(compared(Path(folder), config, mesh, limits))
    mesh.close()
    return Compared(steps, (limits.loss, limits.grad_norm)) if mesh.is_main else None


def outputs(config: Config) -> dict[str, float] | None:
    """Return the mean square of the outputs of each block in the first step, over all samples and ranks, by the block's
    name in forward order. Returns None on ranks other than 0.

    Means do not depend on how outputs are sharded, copied or recomputed.
    """
    mesh = build_mesh(config.parallelism)
    state, take_step = build(config, mesh)
    sums: dict[int, list[Any]] = {}  # by number of the block: its name, sum of squares, number of elements

    def note(number: int, name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        total = sums.setdefault(number, [name, 0.0, 0])
        for each in (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else ():
            if isinstance(each, Tensor) and each.is_floating_point():
                total[1] += each.detach().double().square().sum().item()
                total[2] += each.numel()

    for part in state.parts:
        names = {id(module): name for name, module in part.named_modules()}
        for number, block in state.model.blocks(part).items():
            block.register_forward_hook(partial(note, number, names.get(id(block), f"block {number}")))
    with closing(state.loader):
        take_step(state, lambda _: None)
    shares = gather_objects(mesh, [[number, *total] for number, total in sums.items()])
    mesh.close()
    whole: dict[int, list[Any]] = {}
    for number, name, total, count in (each for share in shares for each in share):
        _, squares, elements = whole.get(number, (name, 0.0, 0))
        whole[number] = [name, squares + total, elements + count]
    return {whole[each][0]: whole[each][1] / max(whole[each][2], 1) for each in sorted(whole)} if mesh.is_main else None


class Death(Observer):
    """Observer that kills its process, as `kill -9` does, when a step begins."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before(self, state: Any) -> None:
        """Kill the process if that step is next."""
        if state.step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: Config, folder: str, killed_rank: int = -1, killed_step: int = 0) -> int:
    """Train in `folder`, going on from its last checkpoint, and return the exit code. Before a step, a rank may die."""
    rank = int(os.environ.get("RANK", "0"))
    watchers = (Death(killed_step),) if rank == killed_rank else ()
    config = replace(config, run=replace(config.run, dir=folder))
    return pretrain(config, attached=Attached(observers=lambda *_: watchers)).exit_code
