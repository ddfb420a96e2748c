"""Reports of a sweep: sweep.json, the table on the terminal, sweep.csv, charts, and sweep.html.

sweep.html is a page with the table and the charts that works offline and without scripts.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from gptlite.errors import printable
from gptlite.files import write_whole
from gptlite.satellites.sweep.compare import Comparison, Row, compare
from gptlite.satellites.sweep.folder import FAILED, OK, OUT_OF_MEMORY, Record, SweepFolder
from gptlite.satellites.sweep.pictures import SweepPicture, draw_all, run_folder
from gptlite.satellites.sweep.table import command, csv_text, shown, table

COLORS = {OK: "ok", FAILED: "bad", OUT_OF_MEMORY: "bad"}


def publish(
    folder: SweepFolder, final: bool, log: Callable[[str], None] = print, *, printed: bool = True
) -> list[Record]:
    """Update the reports and return the records. The charts are drawn only if `final`, after the last cell. The table
    is printed if `printed`.

    Files are replaced atomically. An error in a report is logged as a warning and does not affect other reports.
    """

    @contextmanager
    def attempting(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log(f"warning: sweep report: no {what}: {type(error).__name__}: {error}")

    with folder.updating() as records, attempting("figures"):
        if not records:
            return records
        comparison = compare(records, expected := folder.header.get("cells"))
        if final or (printed and len(records) != expected):  # after the last cell the final table follows
            print(f"\n{table(comparison, final=final, bold=sys.stdout.isatty())}", flush=True)
        pictures: list[SweepPicture] = []
        with attempting("sweep.csv"):
            write_whole(folder.path / "sweep.csv", csv_text(comparison))
        with attempting("pictures"):
            pictures = draw_all(folder.path, comparison, attempting) if final else []
        with attempting("sweep.html"):
            write_whole(folder.path / "sweep.html", page(folder.path, comparison, pictures, final))
    return records


def page(folder: Path, comparison: Comparison, pictures: Sequence[SweepPicture], final: bool) -> str:
    """Return sweep.html, rendered from report.html. Names and reasons may contain any text and are escaped."""
    from jinja2 import Environment, PackageLoader

    def link(row: Row) -> str:
        return quote(os.path.relpath(run_folder(row, folder), folder.absolute())) + "/"

    def encoded(picture: SweepPicture) -> str:
        return base64.b64encode((folder / picture.file).read_bytes()).decode("ascii")

    def visible(value: object) -> object:
        return printable(value, "\n") if isinstance(value, str) and not hasattr(value, "__html__") else value

    # The page must not execute HTML or scripts in a name or an error message.
    pages = Environment(
        loader=PackageLoader("gptlite.satellites.sweep", ""), autoescape=True, trim_blocks=True, finalize=visible
    )
    columns = shown(comparison)
    return pages.get_template("report.html").render(
        name=folder.resolve().name,
        found=comparison,
        pictures=pictures,
        final=final,
        columns=columns,
        colors=COLORS,
        command=command,
        link=link,
        base64=encoded,
    )
