"""Stage `parity`: each reduced world trains like one process. A difference is traced to a layer and an axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gptlite.config.schema import Config
from gptlite.satellites.certify.ranks import RankFailed, run
from gptlite.satellites.certify.reduction import ReducedRuns, dense
from gptlite.satellites.certify.rows import StageRow
from gptlite.satellites.certify.tasks import Compared
from gptlite.satellites.certify.worlds import World

TASKS = "gptlite.satellites.certify.tasks"
STEPS = 3
APART = 1e-4  # relative difference of a block's mean square that is no rounding


def check_parity(reduction: ReducedRuns, folder: Path, done: Callable[[], None]) -> StageRow:
    """Compare the first steps of each world with one process. `done` is called after each run."""
    reference = folder / "reference"
    reference.mkdir()
    run(f"{TASKS}:reference", dense(reduction.alone), folder, str(reference), STEPS)
    done()
    worst = [0.0, 0.0]
    for world in reduction.worlds:
        config = _dense(reduction, world)
        result = compared(config, folder, reference)
        done()
        if problem := result if isinstance(result, str) else difference(result):
            failed = f"{reduction.describe(world)} does not train like one process"
            return StageRow(
                "parity", False, failed, details=(problem, *traced(reduction, world, result, folder, reference))
            )
        assert isinstance(result, Compared)
        distances = [step.distances for step in result.steps]
        worst[0] = max(worst[0], *(each.loss for each in distances))
        worst[1] = max(worst[1], *(value for each in distances for value in each.gradients.values()))
    first, *others = reduction.worlds
    more = f" and {len(others)} other{'s' if others[1:] else ''}" if others else ""
    blocks = f", {reduction.model.blocks[1]} blocks" if reduction.model.blocks else ""
    precision = reduction.base.precision.dtype.name
    words = f"{reduction.describe(first)}{more}{blocks}, {precision}: loss {worst[0]:.0e}, gradients {worst[1]:.0e}"
    return StageRow("parity", True, words)


def compared(config: Config, folder: Path, reference: Path) -> Compared | str:
    """Return the comparison of a configuration's steps with the reference, or why its ranks failed."""
    try:
        return run(f"{TASKS}:compare", config, folder, str(reference))[0]
    except RankFailed as error:
        return str(error)


def difference(result: Compared) -> str:
    """Return the first difference beyond its limit, in words; an empty string if there is none."""
    return next((str(each) for step in result.steps for each in step.differences), "")


def traced(
    reduction: ReducedRuns, world: World, result: Compared | str, folder: Path, reference: Path
) -> tuple[str, ...]:
    """Return lines that name the layer and the axis of a difference."""
    lines = [] if isinstance(result, str) else [_layer(reduction, world, result, folder)]
    if len(world.names) == 1:
        return (*lines, f"axis: {world.names[0]}, the only one of this layout")
    healing = []
    for name in world.names:
        other = reduction.without(world, name)
        if other and not isinstance(again := compared(_dense(reduction, other), folder, reference), str):
            healing += [] if difference(again) else [name]
    if not healing:
        return (*lines, "axis: the difference stays whichever axis has degree 1")
    return (*lines, f"axis: {' with '.join(healing)}, since parity holds if its degree is 1")


def _layer(reduction: ReducedRuns, world: World, result: Compared, folder: Path) -> str:
    """Return the layer of the first difference: in the forward pass, the first block whose output differs; in the
    backward pass, which runs from the loss on, the last layer whose gradient does."""
    step = next(each for each in result.steps if each.differences)
    wrong = [each for each in step.differences if each.what == "gradient"]
    if step.step == 1 and not step.distances.loss <= result.limits[0]:
        alone, ranks = (
            run(f"{TASKS}:outputs", each, folder)[0] for each in (dense(reduction.alone), _dense(reduction, world))
        )
        for name, size in alone.items():
            if not abs(ranks.get(name, float("nan")) - size) <= APART * abs(size):
                return f"layer: {name}, the first whose output differs in the forward pass"
        return "layer: after the last block, as the outputs of all blocks agree and the loss does not"
    if wrong and len(wrong) == len(step.distances.gradients):
        return "layer: all, as every gradient differs and the loss does not"
    if wrong:
        name = wrong[-1].name.rpartition(".")[0] or wrong[-1].name
        return f"layer: {name}, the last whose gradient differs, where the backward pass comes first"
    named = next((each for each in step.differences if each.name), step.differences[0])
    return f"layer: {named.name or named.what}, the first that differs in step {named.step}"


def _dense(reduction: ReducedRuns, world: World) -> Config:
    return dense(reduction.of(world.parallelism))
