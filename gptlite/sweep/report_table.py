"""A sweep on the terminal: a line for each cell, the best in bold, and under it why others have no figures. ASCII."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.invocation import command as written
from gptlite.metrics.console import WIDTH, format_bytes, format_count, format_duration
from gptlite.sweep.judge import judge
from gptlite.sweep.report_rows import ALIKE, Row, agreement, rows_of

if TYPE_CHECKING:
    from gptlite.sweep.record import Record

BOLD, PLAIN = "\033[1m", "\033[0m"
NAME_WIDTH, REASON_LENGTH = 32, 400
MOST_LISTED = 2  # ranks whose memory is listed; of more, the least and the most
UNKNOWN, NOTHING = "n/a", "-"  # of a cell that ran; of one that did not


@dataclass(frozen=True)
class Column:
    """A column of the terminal's table. Where it is too wide, those with the lowest `rank` go first; 9 stays."""

    title: str
    rank: int
    text: Callable[[Row], str | None]
    left: bool = False


COLUMNS = (
    Column("cell", 9, lambda row: shorten(("*" if row.is_best else " ") + row.name, NAME_WIDTH), left=True),
    Column("status", 9, lambda row: row.status, left=True),
    Column("layout", 3, lambda row: shorten(row.layout, NAME_WIDTH), left=True),
    Column("ranks", 4, lambda row: formed(row.world_size, str)),
    Column("tok/s", 9, lambda row: formed(row.speed, format_count)),
    Column("a rank", 7, lambda row: formed(row.speed_per_rank, format_count)),
    Column("MFU", 6, lambda row: formed(row.mfu, "{:.1%}".format)),
    Column("peak", 8, lambda row: formed(row.peak, format_bytes)),
    Column("average", 6, lambda row: formed(row.average, format_bytes)),
    Column("util", 5, lambda row: formed(row.utilization, "{:.0%}".format)),
    Column("of each rank", 2, lambda row: each_rank(row.peaks)),
    Column("step", 8, lambda row: formed(row.step, seconds)),
    Column("compute", 5, lambda row: formed(row.compute, seconds)),
    Column("comm", 5, lambda row: formed(row.communication, seconds)),
    Column("bubble", 5, lambda row: formed(row.bubble, seconds)),
    Column("loss", 8, lambda row: formed(row.loss, "{:.4f}".format)),
    Column("val loss", 8, lambda row: formed(row.val_loss, "{:.4f}".format)),
    Column("-baseline", 6, lambda row: formed(row.difference, difference)),
    Column("step, plan", 4, lambda row: planned(row.predicted_step, row.step, seconds)),
    Column("memory, plan", 4, lambda row: planned(row.predicted_memory, row.tensors, format_bytes)),
    Column("wall", 3, lambda row: formed(row.wall, format_duration)),
    Column("run folder", 1, lambda row: shorten(Path(row.run_dir).name, NAME_WIDTH), left=True),
)


def table(records: Sequence[Record], *, width: int | None = None, bold: bool | None = None) -> str:
    """The sweep so far, as lines for the terminal.

    `width` and `bold` are by default the terminal's, and unlimited and False where the output goes to a file.
    """
    terminal = sys.stdout.isatty()
    strong: bool = terminal if bold is None else bold
    width = (shutil.get_terminal_size().columns if terminal else sys.maxsize) if width is None else width
    rows = rows_of(records)
    if not rows:
        return "sweep: no cells"
    title, left_out, lines = counts(rows), 0, []
    shown = list(COLUMNS)
    while (lines := _lines(rows, shown)) and len(lines[0]) > width and min(column.rank for column in shown) < 9:
        shown.remove(min(shown, key=lambda column: column.rank))
        left_out = len(COLUMNS) - len(shown)
    rule = min(width, max(len(lines[0]), len(title) + 12))
    out = [f"== sweep: {title} ".ljust(rule, "="), lines[0]]
    for row, line in zip(rows, lines[1:], strict=True):
        out.append(f"{BOLD}{line.rstrip()}{PLAIN}" if strong and row.is_best else line.rstrip())
    out += _reasons(rows, min(width, max(WIDTH, rule)))
    out += _closing(rows, left_out, strong, min(width, max(WIDTH, rule)))
    return "\n".join([*out, "=" * rule])


def counts(rows: Sequence[Row]) -> str:
    """`12 cells: 8 ok, 1 out of memory, 3 pruned`."""
    statuses = dict.fromkeys(row.status for row in rows)
    each = ", ".join(f"{sum(row.status == status for row in rows)} {status}" for status in statuses)
    return f"{len(rows)} cell{'s' * (len(rows) > 1)}: {each}"


def best_words(rows: Sequence[Row]) -> str:
    """`tp2: 12.3k tokens/s, 1.40 times single's`, or of the validation loss; empty where no cell has one."""
    by = judge(rows)
    best, base = by.best(rows), next((row for row in rows if row.is_baseline), None)
    value, other = (by.value(row) if row else None for row in (best, base))
    if best is None or not value:
        return ""
    words = f"{best.name}: {f'{format_count(value)} tokens/s' if by.by_speed else f'{by.title} {value:.4f}'}"
    if base is not None and base is not best and other:
        faster = value / other
        words += f", {faster:.2f} times {base.name}'s" if by.by_speed else f", {other - value:.4f} below {base.name}'s"
        words += ", which is within the noise" if by.by_speed and abs(faster - 1) <= ALIKE else ""
    return words


def plan_words(rows: Sequence[Row]) -> str:
    """`the planned order of 8 cells by speed: rank correlation 0.91`; empty for too few of them."""
    found = agreement(rows)
    count = sum(bool(row.ok and row.predicted_step and row.step) for row in rows)
    return "" if found is None else f"the planned order of {count} cells by speed: rank correlation {found:.2f}"


def command(row: Row) -> str:
    """The line that runs a cell alone."""
    return " ".join([written("train"), *map(shlex.quote, row.overrides)])


def seconds(value: float) -> str:
    """A short time in three digits: `0.52 ms`, `98.1 ms`, `1.23 s`, then as format_duration has it."""
    if not value:
        return "0"
    if value >= 99.95:
        return format_duration(value)
    unit, scaled = ("s", value) if value >= 0.9995 else ("ms", 1e3 * value)
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def difference(value: float) -> str:
    """A loss less another's, with its sign: `+1.2e-07`, `0`."""
    return f"{value:+.1e}" if value else "0"


def planned(predicted: float | None, measured: float | None, form: Callable[[float], str]) -> str | None:
    """A prediction, and how far it is above or below what was measured: `110 ms +12%`."""
    if predicted is None:
        return None
    return form(predicted) + (f" {predicted / measured - 1:+.0%}" if measured else "")


def each_rank(sizes: Sequence[float]) -> str | None:
    """`333 MiB, 341 MiB`, or with many ranks `333 MiB to 410 MiB`."""
    if not sizes:
        return None
    if len(sizes) > MOST_LISTED:
        return f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    return ", ".join(map(format_bytes, sizes))


def formed(value: float | None, form: Callable[[float], str]) -> str | None:
    """The figure in words, or None where there is none."""
    return None if value is None else form(value)


def missing(row: Row) -> str:
    """What stands for a figure that a cell does not have."""
    return UNKNOWN if row.ok else NOTHING


def shorten(text: str, width: int) -> str:
    """Text in at most `width` characters, `..` for its middle."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def _lines(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """The header and a line for each row, all equally long."""
    texts = [[column.text(row) or missing(row) for column in columns] for row in rows]
    widths = [max(map(len, each)) for each in zip([column.title for column in columns], *texts, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, widths, columns, strict=True)
        return "  ".join(text.ljust(width) if column.left else text.rjust(width) for text, width, column in padded)

    return [line([" " * (column.rank == 9 and column.title == "cell") + column.title for column in columns])] + [
        line(each) for each in texts
    ]


def _reasons(rows: Sequence[Row], width: int) -> list[str]:
    lines = []
    for row in rows:
        if row.reason:
            words = f"{shorten(row.name, NAME_WIDTH)}: {shorten(row.words, REASON_LENGTH)}"
            lines += textwrap.wrap(words, max(20, width), initial_indent="  ", subsequent_indent="    ")
    return ["", *lines] if lines else []


def _closing(rows: Sequence[Row], left_out: int, bold: bool, width: int) -> list[str]:
    lines = []
    if words := best_words(rows):
        lines.append(f"best  {BOLD}{words}{PLAIN}" if bold else f"best  {words}")
        by = judge(rows)
        best = by.best(rows)
        assert best is not None
        lines += textwrap.wrap(by.words, max(20, width), initial_indent="by    ", subsequent_indent="      ")
        if best.overrides:
            lines.append(f"run   {command(best)}")
    if words := plan_words(rows):
        lines.append(f"plan  {words}")
    lines += [f"plan  assumed a {words}" for words in dict.fromkeys(row.assumed for row in rows) if words]
    above = {str(Path(row.run_dir).parent) for row in rows if row.run_dir}
    if len(above) == 1 and above != {"."}:
        lines.append(f"runs  in {above.pop()}")
    if left_out:
        lines.append(f"{left_out} column{'s' * (left_out > 1)} more in sweep.csv and sweep.html")
    return ["", *lines] if lines else []
