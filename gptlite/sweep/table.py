"""Table of a sweep's cells, on the terminal and in sweep.csv: its columns and their formats."""

from __future__ import annotations

import csv
import io
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gptlite.invocation import command as written
from gptlite.metrics.console import WIDTH, format_bytes, format_count, format_duration
from gptlite.metrics.console import table as aligned
from gptlite.sweep.compare import CATEGORIES, SPEED, Comparison, Row
from gptlite.sweep.folder import OK, PRUNED

NAME_WIDTH, REASON_LENGTH = 24, 400


class Column(NamedTuple):
    """Column of the table: its key in sweep.csv, its title and explanation on the page, and its format.

    Without a title it is only in sweep.csv. A prediction is followed by its deviation from the value in `measured`.
    """

    key: str
    title: str = ""
    words: str = ""
    form: Callable[[Any], str] = str
    measured: str = ""

    def text(self, row: Row) -> str:
        """Return a cell's figure as text; without one, `n/a` if the cell ran and `-` if it did not."""
        value = row[self.key]
        if value in (None, "", []):
            return "n/a" if row["status"] == OK else "-"
        against = row.get(self.measured)
        return self.form(value) + (f" {value / against - 1:+.0%}" if against else "")


def seconds(value: float) -> str:
    """Return a short time with three digits: `0.52 ms`, `98.1 ms`, `1.23 s`; longer ones as format_duration does."""
    if not value:
        return "0"
    if value >= 99.95:
        return format_duration(value)
    unit, scaled = ("s", value) if value >= 0.9995 else ("ms", 1e3 * value)
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def difference(value: float) -> str:
    """Return the difference of two losses, with its sign: `+1.2e-07`, `0`."""
    return f"{value:+.1e}" if value else "0"


PERCENT, LOSS = "{:.1%}".format, "{:.4f}".format
COLUMNS = (
    Column("number"),
    Column("name", "cell", "One run of the sweep, in a separate folder; bold: the best."),
    Column("layout", "layout"),
    Column("status", "status", "Pruned: refused before the sweep began. Out of memory: of a GPU, or of the host."),
    Column("reason", "reason"),
    Column("exit_code"),
    Column("best"),
    Column("baseline"),
    Column("world_size", "ranks"),
    Column(SPEED, "tok/s", "Tokens per second at the run's median speed.", format_count),
    Column("tokens_per_second_per_rank", "per rank", form=format_count),
    Column("mfu", "MFU", "The model's FLOPs over the peak of all devices; n/a if the peak is not known.", PERCENT),
    Column("memory_peak_bytes", "peak", "Memory of the fullest rank. On a GPU: of the caching allocator; on a "
           "CPU: the resident set of the process, libraries included.", format_bytes),
    Column("memory_average_bytes", "average", "Average of the same memory over the run.", format_bytes),
    Column("utilization", "utilisation", "The ranks' mean. On a GPU: the fraction of time in which a kernel ran; on a "
           "CPU: the processor time of a rank over the time available to its threads.", PERCENT),
    Column("memory_peak_bytes_of_each_rank", "of each rank", form=lambda sizes: ", ".join(map(format_bytes, sizes))),
    Column("memory_tensor_bytes", "tensors", "Bytes of tensors on the rank with the most.", format_bytes),
    *(Column(f"memory_{name}_bytes") for name in CATEGORIES),
    Column("step_seconds", "step", "Measured, at the median speed.", seconds),
    Column("compute_seconds", "compute", "The step minus communication and bubble, optimizer included.", seconds),
    Column("communication_seconds", "communication", "Time in collectives, the mean over ranks, without the bubble. "
           "Along a pipeline it includes waiting for the rank before.", seconds),
    Column("bubble_seconds", "bubble", "Derived: the time along a pipeline in which its schedule leaves a rank idle, "
           "with durations of passes in proportion to their FLOPs.", seconds),
    Column("loss", "loss", "Of the last step.", LOSS),
    Column("loss_step"),
    Column("val_loss", "validation", "Loss: nats per token over held-out data after the last step.", LOSS),
    Column("val_bits_per_byte", "bits per byte", "The same loss per byte of text, in bits.", LOSS),
    Column("loss_minus_baseline", "difference", "The loss minus the baseline's at the same step. The baseline is the "
           "cell named single, else the first that is ok.", difference),
    Column("predicted_step_seconds", "planned", "Step time predicted before the run, and its deviation from the "
           "measured one.", seconds, "step_seconds"),
    Column("predicted_memory_bytes", "planned memory", "Predicted memory of tensors, and its deviation.", format_bytes,
           "memory_tensor_bytes"),
    Column("predicted_assumed"),
    Column("wall_seconds", "wall", "Start and end of the cell included, over all attempts.", format_duration),
    Column("run_dir", "run folder"),
    Column("overrides"),
)  # fmt: skip
# Columns on the terminal, the most important first; those that do not fit the width are dropped from the end.
TERMINAL = ("name", "status", SPEED, "step_seconds", "memory_peak_bytes", "val_loss", "loss", "loss_minus_baseline",
            "mfu", "predicted_step_seconds", "utilization", "wall_seconds")  # fmt: skip


def shown(found: Comparison) -> tuple[Column, ...]:
    """Return the columns that have a title, with throughput in the cells' unit."""
    rate = Column(SPEED, "samples/s", "Samples per second at the run's median speed.", format_count)
    return tuple(rate if each.key == SPEED and found.unit == "samples" else each for each in COLUMNS if each.title)


def csv_text(found: Comparison) -> str:
    """Return sweep.csv: a line per cell with every figure, in seconds, bytes and fractions; empty if unknown."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [each.key for each in COLUMNS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in found.rows:
        peaks = " ".join(map(str, row["memory_peak_bytes_of_each_rank"]))
        writer.writerow(row | {"memory_peak_bytes_of_each_rank": peaks, "overrides": shlex.join(row["overrides"])})
    return out.getvalue()


def table(found: Comparison, *, final: bool, bold: bool = False) -> str:
    """Return the table of a sweep for the terminal, with lines of at most 80 characters except for a command.

    The final table also has the reasons of cells without figures (except pruned ones, which were printed before the
    first ran), and the best cell.
    """
    by_key = {each.key: each for each in shown(found)}
    columns = [by_key[key] for key in TERMINAL if any(row[key] is not None for row in found.rows)]
    while max(map(len, lines := _lines(found, columns))) > WIDTH:
        columns.pop()
    if bold:
        lines = [f"\033[1m{line}\033[0m" if line.startswith("*") else line for line in lines]
    text = [f"== sweep: {found.counts} ".ljust(WIDTH, "="), *lines]
    if final:
        text.append("")
        notes = [
            (f"  {shorten(row['name'], WIDTH - 20)}: {row['status']}: ", shorten(row["reason"], REASON_LENGTH))
            for row in found.rows
            if row["reason"] and row["status"] != PRUNED
        ]
        notes += [("best  ", found.best_words), ("by    ", found.judged_by)] if found.best else []
        for name, words in [*notes, *(("plan  ", words) for words in found.plan_words)]:
            text += textwrap.wrap(words, WIDTH, initial_indent=name, subsequent_indent=" " * 6)
        if found.best:
            text.append(f"run   {command(found.best)}")  # whole, so that it can be copied
        if len(above := {str(Path(row["run_dir"]).parent) for row in found.rows if row["run_dir"]}) == 1:
            text.append(f"more  in {above.pop()}: runs, sweep.csv and sweep.html")
    return "\n".join([*text, "=" * WIDTH])


def command(row: Row) -> str:
    """Return the command line that runs a cell alone."""
    return " ".join([written("train"), *map(shlex.quote, row["overrides"])])


def shorten(text: str, width: int) -> str:
    """Return the text in at most `width` characters, with `..` in place of its middle."""
    head = (width - 2) // 2
    return text if len(text) <= width else f"{text[:head]}..{text[head - width + 2 :]}"


def _lines(found: Comparison, columns: list[Column]) -> list[str]:
    """Return the title and a line for each cell; names longer than NAME_WIDTH have a line of their own above it."""
    rows, above = [[each.text(row) for each in columns] for row in found.rows], []
    for row, texts in zip(found.rows, rows, strict=True):
        name = "* "[not row["best"]] + row["name"]
        texts[0], own = (name, "") if len(row["name"]) <= NAME_WIDTH else ("", shorten(name, WIDTH))
        above.append(own)
    titles = [each.title for each in columns]
    title, *lines = aligned([" cell", *titles[1:]], rows, right=" ".join(titles[2:]), indent="")
    return [title, *(line for pair in zip(above, lines, strict=True) for line in pair if line)]
