"""A sweep's reports: sweep.json, the table on the terminal, sweep.csv, pictures, and sweep.html, which has all of them
on one page that needs no network and no script."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from urllib.parse import quote

from gptlite.files import write_whole
from gptlite.sweep.compare import Comparison, Row, compare
from gptlite.sweep.folder import OK, Record, SweepFolder
from gptlite.sweep.pictures import Picture, draw_all, run_folder
from gptlite.sweep.table import COLUMNS, Column, command, csv_text, table

CSS = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 0 auto; max-width: 1500px; padding: 24px 20px 60px }
p, dd, figcaption { margin: 6px 0; max-width: 75em; opacity: 0.85 } dt { font-weight: 600; margin-top: 10px }
.scroll { overflow-x: auto; border: 1px solid #8886; border-radius: 8px; margin-top: 14px }
.run { display: block; padding: 8px 12px; background: #8882; border-radius: 6px; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: 7px 8px; text-align: right; white-space: nowrap; vertical-align: top; font-weight: inherit;
  border-bottom: 1px solid #8886 } thead { background: #8882; font-weight: 600 }
th:first-child { position: sticky; left: 0; max-width: 240px; background: Canvas; white-space: normal;
  text-align: left }
.best { background: #48f3; font-weight: 700 } .ok { color: #1d9a5f } .bad { color: #d9443b }
.reason { text-align: left; white-space: normal; min-width: 200px; max-width: 420px; overflow-wrap: anywhere }
.bar { display: flex; width: 120px; height: 8px; margin: 6px 0 2px auto }
.compute { background: #2460a7 } .communication { background: #d1602a } .bubble { background: #b9c2ce }
figure img { width: 100%; max-width: 1100px; border-radius: 8px }
"""
PARTS = ("compute", "communication", "bubble")


def publish(folder: SweepFolder, final: bool, log: Callable[[str], None] = print) -> list[Record]:
    """Brings the reports up to date, after each cell and at the end; returns the records.

    Each file is whole or as it was. Of a thousand cells' results none is lost for a picture of them: what goes wrong is
    a line for `log`.
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
        found = compare(records)
        if final or len(records) != folder.header.get("cells"):  # else it is the next thing said
            print(f"\n{table(found, final=final, bold=sys.stdout.isatty())}", flush=True)
        pictures: list[Picture] = []
        with attempting("sweep.csv"):
            write_whole(folder.path / "sweep.csv", csv_text(found))
        with attempting("pictures"):
            pictures = draw_all(folder.path, found, attempting) if final else []
        with attempting("sweep.html"):
            write_whole(folder.path / "sweep.html", page(folder.path, found, pictures, final))
    return records


def page(folder: Path, found: Comparison, pictures: Sequence[Picture], final: bool) -> str:
    """The whole page. Names and reasons are the user's and are escaped."""
    name = escape(folder.resolve().name)
    columns = [each for each in COLUMNS if each.title]
    heads = "".join(f"<th scope='col' title='{escape(each.words)}'>{each.title}</th>" for each in columns)
    body = "\n".join(_row(folder, row, columns) for row in found.rows)
    words = "".join(f"<dt>{each.title}</dt><dd>{escape(each.words)}</dd>" for each in columns if each.words)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name}: sweep</title>
<style>{CSS}</style>
</head>
<body>
<h1>Sweep {name}</h1>
<p>{escape(found.counts)}</p>
{"" if final else "<p>The sweep goes on; the pictures come at its end.</p>"}
{_lead(found)}
<div class="scroll" tabindex="0" role="region" aria-label="cells">
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
{"".join(_figure(folder, each) for each in pictures)}
<h2>What the words mean</h2>
<dl>{words}</dl>
</body>
</html>
"""


def _lead(found: Comparison) -> str:
    if found.best is None:
        return "<p>No cell has run to its end yet.</p>"
    lines = [f"By {found.judged_by}.", *(f"The plan: {words}." for words in found.plan_words)]
    faint = "".join(f"<p>{escape(line)}</p>" for line in lines)
    best = f"<p>Best: <strong>{escape(found.best_words)}</strong></p>"
    return f"{best}{faint}<code class='run'>{escape(command(found.best))}</code>"


def _row(folder: Path, row: Row, columns: Sequence[Column]) -> str:
    cells = {each.key: f"<td>{escape(each.text(row))}</td>" for each in columns}
    cells["name"] = f"<th scope='row'>{escape(row['name'])}</th>"
    color = {OK: "ok", "failed": "bad", "out of memory": "bad"}.get(row["status"], "")
    cells["status"] = f"<td class='{color}'>{escape(row['status'])}</td>"
    cells["reason"] = f"<td class='reason'>{escape(row['reason'])}</td>"
    if row["run_dir"]:
        target = os.path.relpath(run_folder(row, folder), folder.absolute())
        cells["run_dir"] = f"<td><a href='{quote(target)}/'>{escape(Path(row['run_dir']).name)}</a></td>"
    if row["baseline"]:
        cells["loss_minus_baseline"] = "<td>baseline</td>"
    if step := row["step_seconds"]:  # a bar of its parts
        shares = {part: (row[f"{part}_seconds"] or 0) / step for part in PARTS}
        bar = "".join(f"<i class='{part}' style='width:{share:.1%}'></i>" for part, share in shares.items())
        cells["step_seconds"] = cells["step_seconds"].replace("</td>", f"<span class='bar'>{bar}</span></td>")
    return f"<tr{' class=best' * row['best']}>{''.join(cells.values())}</tr>"


def _figure(folder: Path, picture: Picture) -> str:
    data = base64.b64encode((folder / picture.file).read_bytes()).decode("ascii")
    title = escape(picture.title)
    return (
        f"<figure><h3>{title}</h3><img alt='{title}' src='data:image/png;base64,{data}'>"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )
