"""Layouts run on real ranks and compared with the planner: the table in docs/planner_memory.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from distributed.cells.run import Ranks

from gptlite.satellites.plan.compression import steps_of_run
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.traffic import transfers
from gptlite.satellites.plan.workload import RankBytes, Transfer
from plan.truth import Counted, workload
from plan.truth_layouts import Layout

MIB = 2**20
HEAD = """\
| ranks | layout | model state, MiB | other memory, MiB | error |
|--:|---|--:|--:|--:|"""


@dataclass(frozen=True)
class Row:
    """One rank of a layout: the planner's figures beside the counted ones. `wrong`: of only one of them."""

    layout: Layout
    place: dict[str, int]
    predicted: RankBytes
    counted: RankBytes
    wrong: tuple[Transfer, ...]

    @property
    def state_error(self) -> float:
        """Of model state, relative."""
        return _state(self.predicted) / _state(self.counted) - 1

    @property
    def error(self) -> float:
        """Of all else, relative."""
        return self.predicted.activations / self.counted.activations - 1

    def mismatches(self) -> list[str]:
        """Parts of the prediction that should equal the counted ones and do not."""
        state = ["model state"] if abs(self.state_error) > 1e-3 else []
        return [*state, "collectives"] if self.wrong else state

    def line(self) -> str:
        """A row of the table: counted sizes in MiB and the error. Model state and collectives are marked if wrong."""
        state, all_else = _state(self.counted) / MIB, self.counted.activations / MIB
        error = ", ".join([f"{self.error:+.1%}", *self.mismatches()])
        return f"| {self.layout.world} | {self.layout.words or 'defaults'} | {state:.3f} | {all_else:.3f} | {error} |"


def _state(size: RankBytes) -> int:
    return size.total - size.activations


def compare(layout: Layout, found: list[Counted]) -> Iterator[Row]:
    """A row for the ranks that differ: the first data rank of each place along pp and tp."""
    work = workload(layout.config(), layout.world)
    steps = steps_of_run(work)  # counted after the warm-up, and between exchanges if there are such steps
    work = replace(work, exchanging=steps.exchanging > 0, alone=steps.alone > 0)
    for each in found:
        place = each.coordinates
        if place["dp_shard"] or place["dp_replicate"]:
            continue
        expected = transfers(work, place["pp"], place["tp"])
        wrong = tuple(sorted(set(expected) ^ set(each.transfers), key=str))
        yield Row(layout, place, estimate(work, place["pp"], place["tp"]), each.bytes, wrong)


def run(layouts: Iterable[Layout], timeout: float = 200) -> Iterator[Row]:
    """Counts on real ranks, those of one world size started once."""
    layouts = list(layouts)
    for world in sorted({layout.world for layout in layouts}):
        with Ranks(world, collective_timeout=timeout) as ranks:
            for layout in layouts:
                if layout.world == world:
                    yield from compare(layout, ranks.run("plan.truth_layouts:count", layout, timeout=timeout))


def worst_rows(layouts: Iterable[Layout]) -> Iterator[Row]:
    """Of each layout the rank whose prediction is furthest off."""
    for layout in layouts:
        yield max(run([layout]), key=lambda row: (bool(row.wrong), abs(row.error)))
