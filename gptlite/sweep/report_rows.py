"""A sweep's cells side by side: the figures that its table, its files and its pictures show.

Nothing here fails on what a record lacks or has of the wrong kind: such a figure is None. No torch here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.sweep.judge import judge
from gptlite.sweep.report_timeline import bubble_share, timeline_of

if TYPE_CHECKING:
    from gptlite.sweep.record import Record

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
OK = "ok"
BASELINE = "single"
ALIKE = 0.05  # speeds closer than this are the same: a measurement on a busy machine tells no less
FEWEST = 4  # cells whose order says something


@dataclass(frozen=True)
class Row:
    """One cell. Seconds are of a step, bytes of the rank that has most where it does not say `ranks`.

    `compute` and `communication` are measured, `bubble` is the part of the measured wait for the pipeline that its
    schedule explains: see `split`. `difference` is this loss less the baseline's. `tensors`, the sum of the categories,
    is what `predicted_memory` predicts; `peak` is all that the process had (on a GPU: the allocator), `average` the
    same over the time of the run. `utilization` is of the devices, the mean over the ranks.
    """

    number: int
    name: str
    layout: str
    status: str
    reason: str
    overrides: list[str]
    world_size: int | None
    run_dir: str
    exit_code: int | None
    wall: float | None
    speed: float | None = None
    mfu: float | None = None
    peaks: tuple[int, ...] = ()
    average: int | None = None
    utilization: float | None = None
    ranks: tuple[dict[str, float], ...] = ()
    step: float | None = None
    compute: float | None = None
    communication: float | None = None
    bubble: float | None = None
    loss: float | None = None
    loss_step: int | None = None
    difference: float | None = None
    val_loss: float | None = None
    val_bits: float | None = None
    predicted_step: float | None = None
    predicted_memory: float | None = None
    assumed: str = ""  # what the prediction had to guess
    pipeline: dict[str, Any] | None = None
    is_baseline: bool = False
    is_best: bool = False

    @property
    def ok(self) -> bool:
        """Whether the cell ran to its end."""
        return self.status == OK

    @property
    def speed_per_rank(self) -> float | None:
        """Tokens a second of one rank."""
        return self.speed / self.world_size if self.speed is not None and self.world_size else None

    @property
    def peak(self) -> int | None:
        """The most of any rank."""
        return max(self.peaks, default=None)

    @property
    def tensors(self) -> float | None:
        """Tensor bytes of the rank that has most of them."""
        return max((sum(rank.values()) for rank in self.ranks), default=None)

    @property
    def words(self) -> str:
        """The status, with its reason where there is one."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A row for each record, in their order; one is the baseline and one the best, if any ran."""
    from dataclasses import replace

    rows = [_row(record) for record in records]
    base, best = baseline(rows), judge(rows).best(rows)
    return [
        replace(row, is_baseline=row is base, is_best=row is best, difference=_difference(row, base)) for row in rows
    ]


def baseline(rows: Sequence[Row]) -> Row | None:
    """What losses are compared with: the cell named `single` if it is ok, else the first ok one that has a loss."""
    fit = [row for row in rows if row.ok and row.loss is not None]
    return next((row for row in fit if _is_single(row)), fit[0] if fit else None)


def agreement(rows: Sequence[Row]) -> float | None:
    """How well the plan ordered the cells by the length of a step: Spearman's rank correlation, 1 for the same order.

    Lengths within 5% of each other are ties. None for fewer than four cells, or where all are tied.
    """
    pairs = [(row.predicted_step, row.step) for row in rows if row.ok and row.predicted_step and row.step]
    if len(pairs) < FEWEST:
        return None
    return _correlation(*(_ranks(values) for values in zip(*pairs, strict=True)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Of each value how many are less, ties counted by half."""

    def before(one: float, other: float) -> float:
        return 0.5 if abs(one - other) <= ALIKE * max(one, other) else float(other < one)

    return [sum(before(one, other) for other in values) for one in values]


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's, of equally many numbers; None where one of them does not vary."""
    from statistics import StatisticsError, correlation

    try:
        return correlation(first, second)
    except StatisticsError:
        return None


def split(
    step: float | None, comm: dict[str, float], pipeline: dict[str, Any] | None
) -> tuple[float | None, float | None, float | None]:
    """A step's seconds of compute, of communication and of the pipeline's bubble; None for what is not known.

    Measured: `comm`, the time that ranks stand in collectives of each axis, and compute, which is the rest. Time along
    the pipeline is waiting for the rank before as much as it is sending. Derived: of that time the bubble is what the
    schedule makes a rank idle for the time it is busy, by its timeline, at most all of it; the rest is communication.
    """
    if step is None:
        return None, None, None
    waits = sum(comm.values())
    compute = max(0.0, step - waits)
    if pipeline is None:
        return compute, waits, 0.0
    share = bubble_share(timeline_of(pipeline))
    if share is None:
        return compute, waits, None
    busy = compute + comm.get("tp", 0.0)
    bubble = min(comm.get("pp", 0.0), busy * share / max(1e-9, 1 - share))
    return compute, waits - bubble, bubble


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def one_line(text: Any, most: int = 2000) -> str:
    """Text without line breaks or control characters, cut with `...` where it is longer than `most`."""
    plain = "".join(char if char.isprintable() else " " for char in str(text or "")[: 4 * most])
    plain = " ".join(plain.split())
    return plain if len(plain) <= most else plain[: most - 3].rstrip() + "..."


def run_folder(row: Row, folder: Path) -> Path:
    """The cell's run folder, which may not be there; a relative one may be the sweep's or the shell's."""
    run = Path(row.run_dir).expanduser()
    # Not Path.exists, which raises for a name that is too long.
    return folder / run if os.path.exists(folder / run) else run.absolute()


def _row(record: Record) -> Row:
    result, predicted = _dict(record.result), _dict(record.predicted)
    world = number(record.world_size) or number(result.get("world_size"))
    ranks = [_dict(rank) for rank in _list(result.get("memory_ranks"))]
    peaks = [int(peak) for rank in ranks if (peak := number(rank.get("peak"))) is not None]
    if not peaks and (peak := number(result.get("memory_peak_bytes"))) is not None:
        peaks = [int(peak)]
    sizes = [{name: number(rank.get(name)) for name in CATEGORIES} for rank in ranks]
    averages = [int(value) for rank in ranks if (value := number(rank.get("average"))) is not None]
    used = [value for rank in ranks if (value := number(rank.get("utilization"))) is not None]
    known = [{name: size for name, size in each.items() if size is not None} for each in sizes]
    comm = {axis: value for axis, each in _dict(result.get("comm_seconds")).items() if (value := number(each))}
    step, pipeline = number(result.get("step_seconds")), _dict(result.get("pipeline")) or None
    compute, communication, bubble = split(step, comm, pipeline)
    memory = predicted.get("memory")
    at = number(result.get("step"))
    return Row(
        number=record.number,
        name=one_line(record.name) or str(record.number),
        layout=one_line(record.layout or result.get("layout")),
        status=one_line(record.status) or "unknown",
        reason=one_line(record.reason),
        overrides=[str(each) for each in _list(record.overrides)],
        world_size=int(world) if world else None,
        run_dir=str(record.run_dir or ""),
        exit_code=record.exit_code,
        wall=number(record.wall_seconds),
        speed=number(result.get("tokens_per_second")),
        mfu=number(result.get("mfu")),
        peaks=tuple(peaks),
        average=max(averages, default=None),
        utilization=sum(used) / len(used) if used else None,
        ranks=tuple(known) if any(known) else (),
        step=step,
        compute=compute,
        communication=communication,
        bubble=bubble,
        loss=number(result.get("loss")),
        val_loss=number(result.get("val_loss")),
        val_bits=number(result.get("val_bits_per_byte")),
        loss_step=int(at) if at is not None else None,
        predicted_step=number(predicted.get("step_seconds")),
        predicted_memory=_total(memory.values()) if isinstance(memory, dict) else number(memory),
        assumed=one_line(predicted.get("assumed")),
        pipeline=pipeline,
    )


def _is_single(row: Row) -> bool:
    return row.name == BASELINE or f"parallelism={BASELINE}" in row.overrides


def _difference(row: Row, base: Row | None) -> float | None:
    """None where there is nothing to compare, or the two are of different steps."""
    if base is None or row.loss is None or base.loss is None or row.loss_step != base.loss_step:
        return None
    return row.loss - base.loss


def _total(values: Iterable[Any]) -> float | None:
    found = [size for value in values if (size := number(value)) is not None]
    return sum(found) if found else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
