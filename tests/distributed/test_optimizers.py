"""Each optimizer on parameters that ranks hold pieces of: the steps of one process, and checkpoints that reshard."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from marking import marked
from torch import Tensor, nn

from distributed.cells.reshard import COUNTERS, OTHER, SAVED, drawn, filled, held, yaml
from distributed.cells.reshard_pairs import SINGLE, Layout, Pair
from distributed.cells.run import GrowingRanks
from distributed.cells.steps import joined
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.config import Config, load
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.parity.gather import Whole, gather
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.state import TrainState

STEPS = 4


def distances(config: Config, world: int, name: str, reference: str, resume: bool = False) -> dict[str, float] | None:
    """On the first `world` ranks: how far every weight and state is from what is in a file, one process's for example,
    after some steps, or after resuming from checkpoint.resume.

    By key on rank 0, as a part of the largest value; infinite where there is no such key, or copies are not alike.
    """
    with joined(world, name) as is_in:
        found = (_resumed if resume else take_steps)(config) if is_in else None
    if found is None:
        return None
    expected: dict[str, Tensor] = torch.load(reference)
    return {key: _distance(found.get(key), expected.get(key)) for key in found | expected}


def _distance(found: Whole | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.disagreements:
        return math.inf
    apart = (found.value - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return apart.item() if apart.isfinite() else math.inf


def saved_after_steps(config: Config, world: int, name: str, reference: str) -> str | None:
    """On the first `world` ranks: steps, then a checkpoint, whose folder is given; what is in it also in a file."""
    with joined(world, name) as is_in:
        found = take_steps(config, save=True) if is_in else None
    if found is not None:
        torch.save({key: whole.value for key, whole in found.items()}, reference)
    return str(Path(config.run.dir) / "checkpoints" / f"step-{STEPS:08d}") if found is not None else None


def _resumed(config: Config) -> dict[str, Whole] | None:
    mesh = build_mesh(config.parallelism)
    state, run = filled(config, mesh, OTHER), RunFolder(config, mesh)
    with closing(state.loader), closing(run.checkpointer):
        run.restore(state)
        found = gather(held(state))
    mesh.close()
    return found


def take_steps(config: Config, save: bool = False) -> dict[str, Whole] | None:
    """Every weight and state after the steps, whole on rank 0, in the group that has been joined, or alone."""
    mesh = build_mesh(config.parallelism)
    state = filled(config, mesh, SAVED)
    with closing(state.loader):
        for value in optimizer_state(state.optimizer).values():
            local_tensor(value).detach().zero_()
        state.refresh_copies()
        for step in range(STEPS):
            _give_gradients(state, step)
            set_step(state.optimizer, step)
            state.optimizer.step()
        found = gather(held(state))
        if save:
            state.step = STEPS
            words = mesh.layout.describe(config.parallelism)
            with closing(Checkpointer(config.checkpoint, Path(config.run.dir), mesh, words)) as into:
                into.save(state.tensors(), state.meta(), yaml(config, mesh), None, print)
    mesh.close()
    return found


def _give_gradients(state: TrainState, step: int) -> None:
    """To every parameter the same as in every other layout: some rows nothing, and sizes that differ by the tensor."""
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            parameter.grad = _gradient(name, parameter, step)


def _gradient(name: str, parameter: nn.Parameter, step: int) -> Tensor:
    whole = drawn(name, parameter.shape, f"gradient {step}") * 10.0 ** -(len(name) % 5)
    if parameter.ndim > 1:
        whole[2::7] = 0.0
    sizes, starts = local_box(parameter)
    box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    gradient = torch.zeros_like(parameter, dtype=torch.float32)
    local_tensor(gradient).detach().copy_(whole[box])
    return gradient


CASES, RESHARD = "distributed.test_optimizers:", "distributed.cells.reshard:"
OPTIMIZERS = ["lamb", "lion", "muon", "adafactor"]
# Uneven shards, and empty ones: 20 and 37 rows over these ranks.
LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=2, data=2, zero=3),
    Layout(data=3, zero=2),
    Layout(data=4, zero=1),
    Layout(data=4, zero=3, replicate=2),
    Layout(tensor=4),
    Layout(data=2),
    Layout(pipeline=2, data=2, zero=1),
    Layout(tensor=2, pipeline=2, data=2, zero=3),
    Layout(tensor=2, pipeline=2, data=2, zero=0, schedule="zbv"),
    Layout(pipeline=2, data=4, zero=2),
    Layout(tensor=2, data=4, zero=3),
    Layout(tensor=4, data=2, zero=3),
    Layout(data=7, zero=3),
    Layout(tensor=2, data=4, zero=2, replicate=2),
]
# Each layout with one optimizer, with the next, and so on.
STEPPED = [
    (layout, OPTIMIZERS[(turn + at) % len(OPTIMIZERS)])
    for turn in range(len(OPTIMIZERS))
    for at, layout in enumerate(LAYOUTS)
]
RESHARDED = [
    (source, target, optimizer)
    for source, target in (
        (Layout(data=4, zero=3), SINGLE),
        (Layout(tensor=2, data=2, zero=3), Layout(data=3, zero=1)),
        (SINGLE, Layout(tensor=2, pipeline=2, data=2, zero=3)),
    )
    for optimizer in ("lamb", "muon", "lion", "adafactor")
]
HALF = "precision=bf16_stochastic"
ROUNDED = [(Layout(tensor=2, data=2, zero=3), "adamw")]
ROUNDED += [
    (layout, optimizer)
    for optimizer in ("adamw", "lion")
    for layout in LAYOUTS
    if layout.schedule != "zbv" and (layout, optimizer) not in ROUNDED
]
RESHARDED_HALF = [
    (Layout(tensor=2, data=2, zero=3), Layout(data=3, zero=1), "adamw"),
    (SINGLE, Layout(tensor=2, pipeline=2, data=2, zero=3), "sgd"),
]


def config_of(layout: Layout, other: Layout, optimizer: str, *overrides: str) -> Config:
    return load([*Pair(layout, other).overrides(layout), layers(layout, other), f"optimizer={optimizer}", *overrides])


def layers(*layouts: Layout) -> str:
    """Where there is no pipeline, a further layer is one more of the same."""
    return f"model.num_layers={5 if any(layout.pipeline > 1 for layout in layouts) else 2}"


FEW = layers(SINGLE)


@lru_cache
def alone(optimizer: str, *overrides: str) -> dict[str, Tensor]:
    """One process's weights and states after the steps."""
    found = take_steps(config_of(SINGLE, SINGLE, optimizer, "run.dir=unused", *overrides))
    assert found is not None
    return {key: whole.value for key, whole in found.items()}


def name(case: tuple[Layout, str] | tuple[Layout, Layout, str]) -> str:
    *layouts, optimizer = case
    return "-to-".join(layout.id for layout in layouts) + f"-{optimizer}"  # type: ignore[union-attr]


@pytest.fixture
def off(growing: GrowingRanks, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """The weights and states of a layout that are further than allowed from one process's after the steps."""

    def run(allowed: float, layout: Layout, optimizer: str, *overrides: str) -> dict[str, float]:
        torch.save(alone(optimizer, layers(layout), *overrides), tmp_path / "reference")
        config = config_of(layout, SINGLE, optimizer, "run.dir=unused", *overrides)
        found = growing.run(layout.world, CASES + "distances", config, str(tmp_path / "reference"))[0]
        return {key: distance for key, distance in found.items() if distance > allowed}

    return run


@pytest.mark.parametrize(("layout", "optimizer"), marked(STEPPED, quick=4, slow=16, name=name))
def test_the_steps_are_those_of_one_process(layout: Layout, optimizer: str, off: Callable):
    """Copies of a parameter, those of a tied embedding too, are bit by bit the same."""
    assert off(1e-5, layout, optimizer) == {}


@pytest.mark.parametrize(("layout", "optimizer"), marked(ROUNDED, quick=1, slow=7, name=name))
def test_bf16_parameters_are_rounded_as_in_one_process(layout: Layout, optimizer: str, off: Callable):
    """To the bit: each element's update is its own, and so is its chance."""
    assert off(0, layout, optimizer, HALF) == {}


def test_rounding_is_by_chance_and_by_the_seed():
    """Else layouts that all round to nearest would agree."""
    found, other, wide = alone("adamw", FEW, HALF), alone("adamw", FEW, HALF, "seed=5"), alone("adamw", FEW)
    weights = [key for key in found if key.startswith("model.") and found[key].ndim > 1]
    for key in weights:
        assert torch.equal(found[key], found[key].bfloat16().float())
        assert not torch.equal(found[key], other[key])
        assert not torch.equal(found[key], wide[key].bfloat16().float())
        assert (found[key] - wide[key]).abs().max() < 0.05


WIDE = ("model.d_model=128", "model.num_heads=2", "model.sequence_length=64", "data.sequence_length=64")


@pytest.mark.parametrize(
    "layout", marked([Layout(data=2, zero=1), Layout(data=2, zero=3)], quick=1, slow=1, name=lambda layout: layout.id)
)
def test_8_bit_steps_are_those_of_one_process_where_shards_are_of_whole_blocks(layout: Layout, off: Callable):
    assert off(0, layout, "adamw_8bit", *WIDE) == {}


@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        # The same blocks of 256 in both: the same codes.
        pytest.param(Layout(data=2, zero=3), SINGLE, 0.0, id="same-blocks", marks=pytest.mark.slow),
        # Other blocks: a code is up to half a step of the finest grid off, 0.7% of its block's largest.
        pytest.param(Layout(data=2, zero=3), Layout(tensor=2), 0.01, id="other-blocks", marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, data=2, zero=3), Layout(data=3, zero=1), 0.01, marks=pytest.mark.slow),
        pytest.param(Layout(data=3, zero=2), Layout(tensor=2), 0.01, marks=pytest.mark.slow),
    ],
)
def test_8_bit_moments_are_resharded(
    source: Layout, target: Layout, most: float, growing: GrowingRanks, tmp_path: Path
):
    file = str(tmp_path / "reference")
    config = config_of(source, target, "adamw_8bit", f"run.dir={tmp_path / 'a'}", *WIDE)
    folder = growing.run(source.world, CASES + "saved_after_steps", config, file)[0]
    given = (f"run.dir={tmp_path / 'b'}", f"checkpoint.resume={folder}", *WIDE)
    config = config_of(target, source, "adamw_8bit", *given)
    found = growing.run(target.world, CASES + "distances", config, file, True)[0]
    assert {key: far for key, far in found.items() if far > (most if "exp_avg" in key else 0)} == {}
    assert any("exp_avg" in key for key in found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_go_somewhere(optimizer: str):
    """Else any two layouts would agree."""
    found = alone(optimizer, FEW)
    states = {key.rsplit(".", 1)[1] for key in found if key.startswith("optim.")}
    assert states <= {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "row_var", "col_var", "variance"}
    for key, value in found.items():
        assert value.isfinite().all(), key
        assert value.any(), key


@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [*marked(RESHARDED, quick=1, slow=8, name=name), *marked(RESHARDED_HALF, quick=1, slow=1, name=name)],
)
def test_a_checkpoint_is_resharded(
    source: Layout, target: Layout, optimizer: str, growing: GrowingRanks, tmp_path: Path
):
    """Of bf16 parameters too, with optimizers that RESHARDED has not."""
    half = [] if optimizer in OPTIMIZERS else [HALF]
    config = config_of(source, target, optimizer, f"run.dir={tmp_path / 'a'}", *half)
    folder = growing.run(source.world, RESHARD + "save", config)[0]
    config = config_of(target, source, optimizer, f"run.dir={tmp_path / 'b'}", f"checkpoint.resume={folder}", *half)
    resumed = growing.run(target.world, RESHARD + "resume", config)
    assert resumed[0].wrong == []
    assert all(each.counters == COUNTERS for each in resumed)
