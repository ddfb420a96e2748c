"""What a sweep leaves behind for a person, made from its records: a table, sweep.csv, sweep.html and pictures."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.files import write_whole
from gptlite.sweep.report_rows import CATEGORIES, Row, rows_of
from gptlite.sweep.report_table import table

if TYPE_CHECKING:
    from gptlite.sweep.record import Record

__all__ = ["csv_text", "table", "write_reports"]


def write_reports(folder: Path, records: Sequence[Record], log: Callable[[str], None], *, final: bool) -> None:
    """Writes sweep.csv and sweep.html beside sweep.json, and with `final` the pictures, which the page then has in it.

    Each file is whole or as it was. Nothing that goes wrong ends the sweep: it is a line for `log`.
    """
    from gptlite.sweep.report_html import page

    def attempt(what: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            log(f"warning: sweep report: no {what}: {type(error).__name__}: {error}")
            return None

    rows = attempt("figures", lambda: rows_of(records))
    if rows is None:
        return
    attempt("sweep.csv", lambda: write_whole(folder / "sweep.csv", csv_text(rows)))
    pictures = attempt("pictures", lambda: _pictures(folder, rows, log)) if final else []
    attempt("sweep.html", lambda: write_whole(folder / "sweep.html", page(folder, rows, pictures or [], final)))


def csv_text(rows: Sequence[Row]) -> str:
    """A line for each cell, every figure in seconds, bytes and fractions, empty where there is none."""
    out = io.StringIO()
    lines = [_csv_row(row) for row in rows]
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["number"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _csv_row(row: Row) -> dict[str, Any]:
    most = max(row.ranks, key=lambda rank: sum(rank.values()), default={})
    return {
        "number": row.number,
        "name": row.name,
        "layout": row.layout,
        "status": row.status,
        "reason": row.reason,
        "exit_code": row.exit_code,
        "best": int(row.is_best),
        "baseline": int(row.is_baseline),
        "world_size": row.world_size,
        "tokens_per_second": row.speed,
        "tokens_per_second_per_rank": row.speed_per_rank,
        "mfu": row.mfu,
        "memory_peak_bytes": row.peak,
        "memory_average_bytes": row.average,
        "utilization": row.utilization,
        "memory_peak_bytes_of_each_rank": " ".join(map(str, row.peaks)),
        "memory_tensor_bytes": row.tensors,
        **{f"memory_{name}_bytes": most.get(name) for name in CATEGORIES},
        "step_seconds": row.step,
        "compute_seconds": row.compute,
        "communication_seconds": row.communication,
        "bubble_seconds": row.bubble,
        "loss": row.loss,
        "loss_step": row.loss_step,
        "val_loss": row.val_loss,
        "val_bits_per_byte": row.val_bits,
        "loss_minus_baseline": row.difference,
        "predicted_step_seconds": row.predicted_step,
        "predicted_memory_bytes": row.predicted_memory,
        "predicted_assumed": row.assumed,
        "wall_seconds": row.wall,
        "run_dir": row.run_dir,
        "overrides": shlex.join(row.overrides),
    }


def _pictures(folder: Path, rows: Sequence[Row], log: Callable[[str], None]) -> list[Any]:
    from gptlite.sweep.report_pictures import draw_all

    return draw_all(folder, rows, log)
