"""Table of a sweep's cells, on the terminal, in sweep.csv and in sweep.html: columns and their formats."""

from __future__ import annotations

import csv
import io
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gptlite.errors import printable
from gptlite.invocation import command as written
from gptlite.metrics.console import WIDTH, format_bytes, format_count, format_duration
from gptlite.metrics.console import table as aligned
from gptlite.satellites.sweep.cells import alone
from gptlite.satellites.sweep.compare import CATEGORIES, SPEED, Comparison, Row
from gptlite.satellites.sweep.folder import OK, PRUNED

NAME_WIDTH, REASON_LENGTH = 24, 400
NOTHING = (None, "", [])  # a row's values where it has none


class Column(NamedTuple):
    """Column of the table: key in sweep.csv, title and explanation (`words`) in sweep.html, and format.

    A column without a title is only in sweep.csv. The text of a prediction includes its deviation from the value of the
    column `measured`.
    """

    key: str
    title: str = ""
    words: str = ""
    form: Callable[[Any], str] = str
    measured: str = ""

    def text(self, row: Row) -> str:
        """Return a cell's value as text; without a value, `n/a` if the cell is ok, else `-`."""
        value = row[self.key]
        if value in NOTHING:
            return "n/a" if row["status"] == OK else "-"
        against = row.get(self.measured)
        return self.form(value) + (f" {value / against - 1:+.0%}" if against else "")


def seconds(value: float) -> str:
    """Return a time as `0.52 ms`, `98.1 ms` or `1.23 s`; from 100 s on, as format_duration does."""
    if not value:
        return "0"
    if value >= 99.95:
        return format_duration(value)
    unit, scaled = ("s", value) if value >= 0.9995 else ("ms", 1e3 * value)
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def difference(value: float) -> str:
    """Return the difference of two losses as text with a sign, such as `+1.2e-07`, or `0`."""
    return f"{value:+.1e}" if value else "0"


PERCENT, LOSS = "{:.1%}".format, "{:.4f}".format
COLUMNS = (
    Column("number"),
    Column("name", "cell", "One run of the sweep, in a separate folder. The best cell is bold."),
    Column("layout", "layout"),
    Column("status", "status", "Pruned: refused before the cell started, or the same as another "
           "cell. Out of memory: on a GPU or on the host."),
    Column("reason", "reason"),
    Column("exit_code"),
    Column("best"),
    Column("baseline"),
    Column("world_size", "ranks"),
    Column(SPEED, "tok/s", "Tokens per second at the run's median speed.", format_count),
    Column("tokens_per_second_per_rank", "per rank", form=format_count),
    Column("mfu", "MFU", "The model's FLOPs per second over all devices' peak; n/a if the peak is unknown.", PERCENT),
    Column("memory_peak_bytes", "peak", "Peak memory of the fullest rank. On a GPU: of the caching allocator; on "
           "a CPU: the resident set of the process, libraries included.", format_bytes),
    Column("memory_average_bytes", "average", "Average of the same memory over the run.", format_bytes),
    Column("utilization", "utilisation", "Mean over ranks. On a GPU: the fraction of time in which a kernel ran; on a "
           "CPU: the processor time of a rank over the time available to its threads.", PERCENT),
    Column("memory_peak_bytes_of_each_rank", "of each rank", form=lambda sizes: ", ".join(map(format_bytes, sizes))),
    Column("memory_tensor_bytes", "tensors", "Bytes of tensors on the rank with the largest total.", format_bytes),
    *(Column(f"memory_{name}_bytes") for name in CATEGORIES),
    Column("step_seconds", "step", "Measured step time at the median speed.", seconds),
    Column("compute_seconds", "compute", "Step time minus communication and bubble; includes the optimizer.", seconds),
    Column("communication_seconds", "communication", "Time in collectives, mean over ranks, minus the bubble. Along a "
           "pipeline it includes waiting for the previous rank.", seconds),
    Column("bubble_seconds", "bubble", "Computed: the time in which the pipeline schedule leaves a rank idle, with "
           "durations of passes in proportion to their FLOPs.", seconds),
    Column("loss", "loss", "Training loss of the last step, in nats per token.", LOSS),
    Column("loss_step"),
    Column("val_loss", "validation", "Loss over held-out data after the last step, in nats per token.", LOSS),
    Column("val_bits_per_byte", "bits per byte", "The validation loss in bits per byte of text.", LOSS),
    Column("loss_minus_baseline", "difference", "The loss minus the baseline's loss at the same step, in nats per "
           "token. The baseline is the cell named single if it is ok, else the first ok cell with a loss.", difference),
    Column("predicted_step_seconds", "planned vs step", "Step time predicted before the run, and its deviation from "
           "the measured one: -50% if the plan is half of it.", seconds, "step_seconds"),
    Column("predicted_memory_bytes", "planned memory", "Predicted memory of tensors, and its deviation from the "
           "measured one.", format_bytes, "memory_tensor_bytes"),
    Column("predicted_assumed"),
    Column("wall_seconds", "wall", "Time from start to end of the cell, summed over all attempts.", format_duration),
    Column("goodput", "goodput", "Share of the time since the run's first start in which it took new steps.", PERCENT),
    Column("run_dir", "run folder"),
    Column("overrides"),
)  # fmt: skip
# Columns on the terminal, the most important first. If they do not fit the width, the last ones are dropped.
TERMINAL = ("name", "status", SPEED, "step_seconds", "memory_peak_bytes", "val_loss", "loss", "loss_minus_baseline",
            "mfu", "predicted_step_seconds", "utilization", "wall_seconds", "goodput")  # fmt: skip


def shown(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns that have a title and a value, with throughput in samples if the cells read samples.

    Name, status and the figure by which the best cell is chosen come first, then the others of TERMINAL.
    """
    rate = Column(SPEED, "samples/s", "Samples per second at the run's median speed.", format_count)
    filled = {each.key for each in COLUMNS if any(row[each.key] not in NOTHING for row in comparison.rows)}
    titled = {each.key: each for each in COLUMNS if each.title and each.key in filled}
    if comparison.unit == "samples" and SPEED in titled:
        titled[SPEED] = rate
    first = [*TERMINAL[:2], comparison.measure, *TERMINAL[2:]]
    return tuple(titled[key] for key in dict.fromkeys([*first, *titled]) if key in titled)


def csv_text(comparison: Comparison) -> str:
    """Return sweep.csv: a line per cell with all values, in seconds, bytes and fractions; empty if unknown."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [each.key for each in COLUMNS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        peaks = " ".join(map(str, row["memory_peak_bytes_of_each_rank"]))
        writer.writerow(row | {"memory_peak_bytes_of_each_rank": peaks, "overrides": shlex.join(row["overrides"])})
    return out.getvalue()


def table(comparison: Comparison, *, final: bool, bold: bool = False) -> str:
    """Return the table of a sweep for the terminal, with lines of at most 80 characters except for a command.

    The final table also has the best cell, and the cells' reasons, except those of pruned cells, which have already
    been printed.
    """
    by_key = {each.key: each for each in shown(comparison)}
    columns = [by_key[key] for key in TERMINAL if key in by_key]
    while max(map(len, lines := _lines(comparison, columns))) > WIDTH:
        columns.pop()
    if bold:  # after control characters have been escaped
        lines = [f"\033[1m{line}\033[0m" if line.startswith("*") else line for line in lines]
    text = [f"== sweep: {comparison.counts} ".ljust(WIDTH, "="), *lines]
    if final:
        text.append("")
        notes = [
            (
                f"  {shorten(printable(row['name']), WIDTH - 20)}: {row['status']}: ",
                shorten(row["reason"], REASON_LENGTH),
            )
            for row in comparison.rows
            if row["reason"] and row["status"] != PRUNED
        ]
        notes += [("best  ", comparison.best_words), ("by    ", comparison.judged_by)] if comparison.best else []
        for name, words in [*notes, *(("plan  ", words) for words in comparison.plan_words)]:
            text += textwrap.wrap(printable(words, "\n"), WIDTH, initial_indent=name, subsequent_indent=" " * 6)
        if comparison.best:
            text.append(f"run   {printable(command(comparison.best))}")  # not wrapped, so that it can be copied
        if len(above := {str(Path(row["run_dir"]).parent) for row in comparison.rows if row["run_dir"]}) == 1:
            text.append(f"more  in {printable(above.pop())}: runs, sweep.csv and sweep.html")
    return "\n".join([*text, "=" * WIDTH])


def command(row: Row) -> str:
    """Return the command line that runs a cell alone."""
    return " ".join([written("train"), *map(shlex.quote, alone(row["overrides"]))])


def shorten(text: str, width: int) -> str:
    """Return the text, cut to at most `width` characters with `..` in place of the middle."""
    head = (width - 2) // 2
    return text if len(text) <= width else f"{text[:head]}..{text[head - width + 2 :]}"


def _lines(found: Comparison, columns: list[Column]) -> list[str]:
    """Return the title line and a line for each cell. Names longer than NAME_WIDTH are on a separate line above."""
    rows, above = [[each.text(row) for each in columns] for row in found.rows], []
    for row, texts in zip(found.rows, rows, strict=True):
        name = "* "[not row["best"]] + printable(row["name"])
        texts[0], own = (name, "") if len(name) <= NAME_WIDTH + 1 else ("", shorten(name, WIDTH))
        above.append(own)
    titles = [each.title for each in columns]
    title, *lines = aligned([" cell", *titles[1:]], rows, right=" ".join(titles[2:]), indent="")
    return [title, *(line for pair in zip(above, lines, strict=True) for line in pair if line)]
