"""Comparison of a sweep's cells: figures, baseline, best cell and its criterion. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation
from typing import Any

from gptlite.checkpoint.compare import Effect, effect_of
from gptlite.config.overrides import values_of
from gptlite.metrics.console import format_count
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES
from gptlite.progress import counted
from gptlite.satellites.plan.timeline import Timeline, timeline
from gptlite.satellites.sweep.folder import OK, Record

Row = dict[str, Any]  # a cell's record and figures, by the columns of sweep.csv
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
ROUNDING = 0.01  # relative; losses of one run on different layouts differ less, even in 16 bits
ALIKE = 0.05  # relative; closer speeds count as equal, since measurements on a busy machine are no more precise
FEWEST = 4  # cells needed for a meaningful rank correlation
MOST_PASSES = 20_000  # in a timeline; more take long to compute and cannot be distinguished in a picture
SPEED = "tokens_per_second"
MEASURED = (SPEED, "unit", "mfu", "step_seconds", "loss", "val_loss", "val_bits_per_byte", "pipeline", "goodput")
# Criteria for the best cell if cells train different models; the first one for which a cell has a value is used.
LOSSES = {
    "val_bits_per_byte": "validation bits per byte",
    "val_loss": "validation loss",
    "loss": "training loss (no validation loss)",
}
# Cells that differ in these keys read different tokens, so only bits per byte are comparable, not nats per token.
TOKENS = {"data", "data.tokenizer", "data.vocab_size", "data.path", "data.corpus", "data.blend"}
# A resumed run may change these keys and remains the same run, but cells that differ in them have different results.
ENDS_ELSEWHERE = ("model", "trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "trainer.stop_step")
ENDS_ELSEWHERE += ("checkpoint.resume", "checkpoint.load")
# These keys change only the rounding.
ROUNDS = ("ops", "trainer.compile")


@dataclass(frozen=True)
class Comparison:
    """Cells in order. `axes` are the keys that differ between cells and change results by more than rounding.

    `measure` is the column that selects the best cell: speed if there are no axes, else a loss. `expected` is the
    number of cells of the whole sweep, None if the sweeper has no fixed number.
    """

    rows: list[Row]
    axes: list[str]
    measure: str
    baseline: Row | None
    best: Row | None
    expected: int | None = None

    @property
    def counts(self) -> str:
        """Summary such as `12 cells: 8 ok, 1 out of memory, 3 pruned`, or `2 of 12 cells: 2 ok` before the end."""
        statuses = [row["status"] for row in self.rows]
        each = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        number = len(self.rows)
        total = max(number, self.expected or 0)
        return f"{f'{number} of ' if number < total else ''}{counted(total, 'cell')}: {each}"

    @property
    def unit(self) -> str:
        """Unit of throughput: tokens, or samples if all cells with a result read samples."""
        return "samples" if {row.get("unit") for row in self.rows} - {None} == {"samples"} else "tokens"

    @property
    def title(self) -> str:
        """Name of `measure` in words."""
        return LOSSES.get(self.measure, "speed")

    @property
    def judged_by(self) -> str:
        """Criterion such as `validation loss, since optimizer.lr changes the numbers`."""
        if not self.axes and self.losses_apart > ROUNDING:
            apart = f"losses differ by {self.losses_apart:.1%}, e.g. because batch norm depends on the micro-batches"
            return f"{self.title}; {apart}"
        verb = "change" if len(self.axes) > 1 else "changes"
        return f"{self.title}, since {' and '.join(self.axes) or 'no axis'} {verb} the numbers"

    @property
    def losses_apart(self) -> float:
        """Range of the cells' losses as a fraction of the largest loss; 0 without losses."""
        losses = [row["loss"] for row in self.rows if row["status"] == OK and row["loss"] is not None]
        return (max(losses) - min(losses)) / abs(max(losses)) if losses and max(losses) else 0.0

    @property
    def best_words(self) -> str:
        """The best cell's result, such as `tp2: 12.3k tokens/s, 1.40 times single's`; empty if there is no best cell.

        It is compared with the baseline. If `measure` is a loss, the result is the loss.
        """
        if (best := self.best) is None:
            return ""
        value, speed = best[self.measure], self.measure == SPEED
        result = f"{best['name']}: " + (
            f"{format_count(value)} {self.unit}/s" if speed else f"{self.title} {value:.4f}"
        )
        base = self.baseline
        if base is None or base is best or not base[self.measure]:
            return result
        faster, other = value / base[self.measure], f"{base['name']}'s"
        noise = ", which is within the noise" if abs(faster - 1) <= ALIKE else ""
        lower = f"{base[self.measure] - value:.4f} below {other}"
        return f"{result}, {f'{faster:.2f} times {other}{noise}' if speed else lower}"

    @property
    def plan_words(self) -> list[str]:
        """Lines on the rank correlation of planned and measured step times, and on the plan's assumptions."""
        pairs = [(row["predicted_step_seconds"], row["step_seconds"]) for row in self.rows if row["status"] == OK]
        pairs = [pair for pair in pairs if all(pair)]
        lines = [words for words in dict.fromkeys(row["predicted_assumed"] for row in self.rows) if words]
        if (rank := agreement(pairs)) is not None:
            lines.insert(0, f"rank correlation of planned and measured speeds over {len(pairs)} cells: {rank:.2f}")
        return lines


def compare(records: Sequence[Record], expected: int | None = None) -> Comparison:
    """Return the records as rows, with the baseline and the best cell marked.

    The baseline is the cell named `single` if it is ok, else the first ok cell with a loss. Without axes the best cell
    is the fastest cell; with axes, it is the fastest cell with the same axis values as the cell with the lowest loss.
    """
    rows = [_row(record) for record in records]
    ok = [row for row in rows if row["status"] == OK]
    values = [values_of(each for each in row["overrides"] if "=" in each) for row in rows]
    keys = dict.fromkeys(key for each in values for key in each)
    axes = [key for key in keys if changes_numbers(key) and len({each.get(key) for each in values}) > 1]
    losses = [key for key in LOSSES if key != "val_bits_per_byte" or TOKENS & set(axes)]
    known = (key for key in losses if any(row[key] is not None for row in ok))
    measure = next(known, "val_loss") if axes else SPEED
    judged = [row for row in ok if row[measure] is not None]
    if axes and judged:
        settings = {row["number"]: [each.get(key) for key in axes] for row, each in zip(rows, values, strict=True)}
        # Only cells with the settings of the lowest loss compete for speed.
        least = settings[min(judged, key=lambda row: row[measure])["number"]]
        judged = [row for row in judged if settings[row["number"]] == least]
    best = max(judged, key=lambda row: row[SPEED] or 0, default=None)
    fit = [row for row in ok if row["loss"] is not None]
    single = (row for row in fit if row["name"] == "single" or "parallelism=single" in row["overrides"])
    baseline = next(single, fit[0] if fit else None)
    for row in rows:
        row["best"], row["baseline"] = int(row is best), int(row is baseline)
        if baseline and row["loss"] is not None and row["loss_step"] == baseline["loss_step"]:
            row["loss_minus_baseline"] = row["loss"] - baseline["loss"]
    return Comparison(rows, axes, measure, baseline, best, expected)


def _row(record: Record) -> Row:
    """Return a cell's figures, None for unknown ones. Times are seconds per step, and bytes are of the fullest rank.

    The bytes of tensors, the sum of CATEGORIES, are comparable with the planner's prediction. Peak and average (the
    mean over the run) are of the whole process, or on a GPU of the allocator.
    """
    result: dict[str, Any] = dict(record.result)
    result.update((key, None) for key, value in result.items() if isinstance(value, float) and not math.isfinite(value))
    predicted, ranks = record.predicted or {}, result.get("memory_ranks") or []

    def known(key: str) -> list[Any]:
        """Return the values of the ranks that have one."""
        return [rank[key] for rank in ranks if rank.get(key) is not None]

    peak = result.get("memory_peak_bytes")
    peaks = known("peak") or ([peak] if peak is not None else [])
    used, world, speed = known("utilization"), record.world_size or result.get("world_size"), result.get(SPEED)
    tensors = [{name: rank[name] for name in CATEGORIES if rank.get(name) is not None} for rank in ranks]
    fullest = max(tensors, key=lambda rank: sum(rank.values()), default={})
    parts = split(result.get("step_seconds"), result.get("comm_seconds") or {}, result.get("pipeline"))
    return vars(record) | {key: result.get(key) for key in MEASURED} | {
        "world_size": world,
        "tokens_per_second_per_rank": speed / world if speed is not None and world else None,
        "memory_peak_bytes": max(peaks, default=None),
        "memory_average_bytes": max(known("average"), default=None),
        "utilization": sum(used) / len(used) if used else None,
        "memory_peak_bytes_of_each_rank": peaks,
        "memory_tensor_bytes": sum(fullest.values()) if fullest else None,
        **{f"memory_{name}_bytes": fullest.get(name) for name in CATEGORIES},
        **dict(zip(("compute_seconds", "communication_seconds", "bubble_seconds"), parts, strict=True)),
        "loss_step": result.get("step"),
        "loss_minus_baseline": None,
        "predicted_step_seconds": predicted.get("step_seconds"),
        "predicted_memory_bytes": sum(predicted["memory"].values()) if "memory" in predicted else None,
        "predicted_assumed": predicted.get("assumed", ""),
        "ranks": tensors if fullest else [],
        "fullest": fullest,
    }  # fmt: skip


def changes_numbers(key: str) -> bool:
    """Return True if cells that differ in this key train different models."""

    def within(keys: Sequence[str]) -> bool:
        return any(key == each or key.startswith(f"{each}.") for each in keys)

    if within(ENDS_ELSEWHERE):
        return key != "model.name"
    return not within(ROUNDS) and effect_of(key) in (Effect.refused, Effect.changes_numbers)


def split(
    step: float | None, comm: dict[str, float], pipeline: dict[str, Any] | None
) -> tuple[float | None, float | None, float | None]:
    """Return the seconds of compute, communication and pipeline bubble in a step, None for unknown values.

    `comm` is the measured time in collectives, {axis: seconds}; compute is the rest of the step. Time along the
    pipeline axis includes waiting for the previous rank. The bubble is derived: the idle fraction of the schedule's
    timeline, applied to a rank's busy time, but at most the time along the pipeline axis. The remaining time in
    collectives is communication.
    """
    if step is None:
        return None, None, None
    waits = sum(value or 0 for value in comm.values())
    compute = max(0.0, step - waits)
    if pipeline is None:
        return compute, waits, 0.0
    if (found := timeline_of(pipeline)) is None:
        return compute, waits, None
    share = bubble_share(found)
    # Tensor-parallel collectives are part of a pass, so a rank counts as busy during them.
    busy = compute + (comm.get("tp") or 0)
    # A bubble that is a fraction f of the whole step is f / (1 - f) of the busy time.
    bubble = min(comm.get("pp") or 0, busy * share / max(1e-9, 1 - share))
    return compute, waits - bubble, bubble


def timeline_of(pipeline: dict[str, Any], compute: float = 1.0) -> Timeline | None:
    """Return the timeline of a step, with no time for messages; None for an unknown schedule or too many passes.

    `pipeline` is the entry of that name in result.json. Durations are proportional to FLOPs: a backward pass takes
    twice as long as a forward pass, or three times with full recomputation. `compute` is the mean time, in seconds,
    that a rank computes in a step.
    """
    ranks, micro_batches, flops = pipeline["ranks"], pipeline["micro_batches"], pipeline["stage_flops"]
    schedule = pipeline["schedule"]
    if schedule not in SCHEDULES or 3 * micro_batches * len(flops) > MOST_PASSES:
        return None
    if len(flops) != ranks * pipeline["stages_per_rank"] or not 0 < min(flops) <= max(flops) < math.inf:
        return None  # of a damaged or foreign file
    virtual = None if SCHEDULES[schedule].fixed else pipeline["stages_per_rank"]
    config = ParallelismConfig(pipeline=ranks, schedule=schedule, virtual_stages=virtual, data=None)
    backward = 3 if pipeline.get("activation_checkpointing") == "full" else 2
    unit = compute * ranks / (micro_batches * (1 + backward) * sum(flops))
    forward = [each * unit for each in flops]
    try:
        return timeline(config, micro_batches, forward, [backward * each for each in forward], 0.0)
    except ValueError:  # too few micro-batches for the schedule: of a damaged or foreign file
        return None


def bubble_share(found: Timeline) -> float:
    """Return the fraction of the step in which a rank is idle, on average over ranks."""
    return sum(map(found.bubble, range(found.ranks))) / found.ranks


def schedule_words(pipeline: dict[str, Any]) -> str:
    """Return a description such as `1f1b, 2 ranks, 8 micro-batches`."""
    stages = pipeline["stages_per_rank"]
    each = f", {stages} stages per rank" if stages > 1 else ""
    return f"{pipeline['schedule']}, {pipeline['ranks']} ranks{each}, {pipeline['micro_batches']} micro-batches"


def agreement(pairs: Sequence[Sequence[float]]) -> float | None:
    """Return Spearman's rank correlation of pairs, 1 for the same order. Values within 5% of each other are ties.

    None for fewer than four pairs, or if all are tied.
    """

    def ranks(values: Sequence[float]) -> list[float]:
        """Return for each value the number of smaller ones, with ties counted half."""
        of_all = [[0.5 if abs(a - b) <= ALIKE * max(a, b) else float(b < a) for b in values] for a in values]
        return list(map(sum, of_all))

    try:
        return correlation(*map(ranks, zip(*pairs, strict=True))) if len(pairs) >= FEWEST else None
    except StatisticsError:
        return None
