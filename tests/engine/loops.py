"""Training loops over an engine, for ranks and for one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gptlite

FP32 = ("precision=fp32", "optimizer.lr=1e-2")
SAMPLES, WIDTH, CLASSES = 8, 12, 5
HELD_OUT = range(100, 103)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


class Net(nn.Module):
    """Blocks with buffers, a weight used at both ends and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CLASSES, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.first.weight = nn.Parameter(torch.randn(WIDTH, CLASSES), requires_grad=False)
        self.again = nn.ParameterList([self.last.weight])
        self.register_buffer("scale", torch.rand(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) + x @ self.again[0].T) * self.scale


def stages() -> nn.Sequential:
    """A module that a pipeline can cut."""
    ends = nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(ends[0], nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), ends[1])


BUILDERS = {"net": Net, "stages": stages}


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: more targets are ignored in its first half than in its second."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, CLASSES, generator=draw)
    y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    y[: step % 3] = -100
    return x, y


def train(builder: str, last: int, *overrides: str, load: str = "", save: str = "") -> dict[str, Any]:
    """Train to step `last` from rank 0's values, and return losses, norms and an evaluation.

    Other ranks' modules have other values, or as `stages` none. With several data ranks each has a share of a batch.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    with torch.device("meta" if rank and builder == "stages" else "cpu"):
        module = BUILDERS[builder]()
    with gptlite.initialize(module, config=[*FP32, *overrides]) as engine:
        share = slice(engine.data_rank, None, engine.data_size)
        extra = engine.load(load).extra if load else {}
        results = []
        for number in range(engine.step_number, last):
            x, y = global_batch(number)
            results.append(engine.step((x[share], y[share])))
        if save:
            engine.save(save, extra={"last": last})
        found = engine.evaluate((x[share], y[share]) for x, y in map(global_batch, HELD_OUT))
        curve = [value for each in results for value in (each.loss, each.grad_norm)]
        return {
            "curve": curve,
            "evaluation": [found.loss, found.means["accuracy"]],
            "scales": [each.loss_scale for each in results],
            "samples": [each.samples for each in results],
            "extra": extra,
            "step": engine.step_number,
        }


def train_with(options: dict[str, str], builder: str, last: int, *overrides: str) -> dict[str, Any]:
    """`train`, for callers that can pass only positional arguments."""
    return train(builder, last, *overrides, **options)


def uneven(what: str) -> str:
    """The error of a call with different batches on two ranks."""
    rank = dist.get_rank()
    with gptlite.initialize(stages(), config=[*FP32, "parallelism=zero2"]) as engine:
        try:
            if what == "micro-batches":
                engine.step([global_batch(0)] * (rank + 1))
            if what == "evaluation":
                found = engine.evaluate([global_batch(step) for step in range(rank + 1)])
                return f"{found.tokens}"
        except gptlite.ConfigError as error:
            return str(error)
    return ""


def other_module() -> str:
    """The error of ranks with different modules, and of none with values on rank 0."""
    try:
        gptlite.initialize(stages() if dist.get_rank() else nn.Linear(2, 2))
    except gptlite.ConfigError as error:
        return str(error)
    return ""


def joins(code: str, folder: str) -> tuple[str, bool, bool]:
    """Run a program on ranks that have not joined a group: what is left of the group and the environment."""
    os.chdir(folder)
    before = dict(os.environ)
    found: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), found)
    return f"{found['result'].loss:.6f}", dist.is_initialized(), dict(os.environ) == before


def checkpoints(folder: Path) -> list[str]:
    """Names of a folder's checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def tied() -> str:
    """The error of a module that shares a parameter between two blocks."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    try:
        gptlite.initialize(module, config=["parallelism=zero2"])
    except gptlite.ConfigError as error:
        return str(error)
    return ""
