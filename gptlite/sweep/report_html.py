"""sweep.html: the table, the pictures and what the words mean, on one page that needs no network and no script."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gptlite.metrics.console import format_bytes, format_count, format_duration
from gptlite.sweep.judge import judge
from gptlite.sweep.report_rows import Row, run_folder
from gptlite.sweep.report_table import (
    best_words,
    command,
    counts,
    difference,
    formed,
    missing,
    plan_words,
    planned,
    seconds,
)

if TYPE_CHECKING:
    from gptlite.sweep.report_pictures import Picture

CSS = """
:root { color-scheme: light dark; --ink: #23272e; --faint: #5d6673; --line: #dfe3e8; --page: #fff; --band: #f5f7f9;
  --best: #e8f1fb; --compute: #2460a7; --comm: #d1602a; --bubble: #b9c2ce; --ok: #1d7a4f; --bad: #b3261e;
  --warn: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #9aa4b1; --line: #353c46; --page: #16191d;
  --band: #1e2329; --best: #1c3150; --compute: #6ea5e6; --comm: #ee8a57; --bubble: #55606e; --ok: #5fcf9a;
  --bad: #ff8a80; --warn: #e5b567 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1500px; margin: 0 auto; padding: 24px 20px 60px }
h1 { margin: 0; font-size: 26px } h2 { margin: 36px 0 10px; font-size: 19px }
p { margin: 6px 0; max-width: 75em } .faint, figcaption { color: var(--faint) } code { font-size: 13px }
.lead { font-size: 17px } .run { display: block; padding: 8px 12px; background: var(--band); border-radius: 6px;
  overflow-wrap: anywhere }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin-top: 14px }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums }
th, td { padding: 7px 8px; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line) }
tbody tr:last-child > * { border-bottom: 0 }
thead th { background: var(--band); font-weight: 600; vertical-align: bottom }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); max-width: 240px;
  overflow-wrap: break-word; white-space: normal; min-width: 130px } thead th:first-child { background: var(--band) }
th.left { text-align: left } small { display: block; color: var(--faint); font-weight: 400; font-size: 12px }
td.why { text-align: left; white-space: normal; max-width: 420px; overflow-wrap: anywhere }
td.why small { min-width: 150px; max-width: min(58vw, 60em) }
td.folder { text-align: left; white-space: normal; min-width: 90px; overflow-wrap: anywhere }
a { color: var(--compute) }
tbody th { font-weight: 400 } tr.best > * { background: var(--best) !important; font-weight: 700 }
.ok { color: var(--ok) } .bad { color: var(--bad) } .warn { color: var(--warn) }
.bar { display: flex; width: 120px; height: 8px; margin: 6px 0 2px auto; border-radius: 3px; overflow: hidden }
.bar i { display: block; height: 100% } .c { background: var(--compute) } .m { background: var(--comm) }
.b { background: var(--bubble) } .key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin: 0 5px 0 14px } .key i:first-child { margin-left: 0 }
figure { margin: 18px 0 30px } figure img { display: block; width: 100%; max-width: 1100px; height: auto;
  background: #fff; border-radius: 8px; border: 1px solid var(--line) }
figcaption { max-width: 75em; margin-top: 6px } dt { font-weight: 600; margin-top: 10px }
dd { margin: 0; max-width: 75em }
@media (max-width: 600px) { main { padding: 16px 12px 40px } h1 { font-size: 22px } .lead { font-size: 15px }
  th:first-child { max-width: 120px; min-width: 84px } }
"""

WORDS = (
    ("cell", "One run of the sweep, in its own folder. Bold: the best, by validation loss where the cells "
             "differ in what changes the numbers, else by speed."),
    ("status", "ok; out of memory (of a GPU, or over trainer.host_memory_limit); pruned: refused before the sweep "
               "began; failed; interrupted."),
    ("tokens/s, MFU", "At the run's median speed. MFU: the model's FLOPs over the peak of all devices, n/a where the "
                      "peak is not known, as on a CPU."),
    ("utilisation", "Mean over the ranks: on a GPU NVML's share of the time in which a kernel ran, on a CPU the "
                    "processor time of the rank over that of its threads."),
    ("peak memory", "The highest of each rank: on a GPU all that the allocator handed out, on a CPU the resident set "
                    "of the process, libraries included; and the average over the run of the rank that has most."),
    ("step", "Measured: its length, and how long ranks on average stand in collectives of each axis. Compute is the "
             "rest, the optimizer included. Along a pipeline to stand is to wait for the rank before as much as to "
             "send. Derived: the bubble is the part of that time that the schedule makes a rank idle, by its timeline "
             "with passes as long as their FLOPs; what is above it is communication."),
    ("difference", "The last step's loss less the baseline's at the same step. The baseline is the cell named single, "
                   "else the first that is ok."),
    ("validation loss", "Nats per token over held-out data after the last step, and bits per byte of its text."),
    ("predicted", "By the plan, before the run, and how far above (+) or below (-) the measured figure. Memory is "
                  "compared with the tensors of the rank that has most, which exclude libraries."),
    ("rank correlation", "Spearman's, of the cells' planned and measured steps: 1 where the plan has them in the right "
                         "order, 0 where it says nothing. Steps within 5% of each other are ties."),
)  # fmt: skip
HEADS = (
    ("cell", "layout", ""),
    ("status", "", "left"),
    ("tokens/s", "of a rank", ""),
    ("MFU", "utilisation", ""),
    ("peak memory", "of each rank; average", ""),
    ("step", "compute + communication + bubble", ""),
    ("loss", "difference", ""),
    ("validation loss", "bits per byte", ""),
    ("predicted step", "", ""),
    ("predicted memory", "measured tensors", ""),
    ("wall", "", ""),
    ("run folder", "", "left"),
)


def page(folder: Path, rows: Sequence[Row], pictures: Sequence[Picture], final: bool) -> str:
    """The whole page. Names and reasons are the user's and are escaped."""
    name = escape(folder.resolve().name)
    heads = "".join(f"<th scope='col'{_class(kind)}>{title}{_small(sub)}</th>" for title, sub, kind in HEADS)
    body = "\n".join(_row(folder, row) for row in rows) or f"<tr><td colspan='{len(HEADS)}'>no cells</td></tr>"
    figures = "\n".join(_figure(picture) for picture in pictures)
    unfinished = "" if final else "<p class='warn'>The sweep goes on; the pictures come at its end.</p>"
    words = "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in WORDS)
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
<main>
<h1>Sweep {name}</h1>
<p class="faint">{escape(counts(rows)) if rows else "no cells"}</p>
{unfinished}{_lead(rows)}
<div class="scroll" tabindex="0" role="region" aria-label="cells">
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
<p class="key faint"><i class="c"></i>compute<i class="m"></i>communication<i class="b"></i>bubble</p>
{f"<h2>Pictures</h2>{figures}" if pictures else ""}
<h2>What the words mean</h2>
<dl>{words}</dl>
</main>
</body>
</html>
"""


def _lead(rows: Sequence[Row]) -> str:
    by = judge(rows)
    best = by.best(rows)
    if best is None or not (words := best_words(rows)):
        return "<p class='lead'>No cell has run to its end yet.</p>" if rows else ""
    line = f"<p class='lead'>Best: <strong>{escape(words)}</strong></p>"
    line += f"<p class='faint'>By {escape(by.words)}.</p>"
    line += f"<code class='run'>{escape(command(best))}</code>" if best.overrides else ""
    plan = plan_words(rows)
    return line + (f"<p class='faint'>{escape(plan[:1].upper() + plan[1:])}.</p>" if plan else "")


def _row(folder: Path, row: Row) -> str:
    def cell(text: str | None, sub: str | None = None) -> str:
        return f"<td>{escape(text or missing(row))}{_small(escape(sub or ''))}</td>"

    each = " · ".join(map(format_bytes, row.peaks)) if len(row.peaks) > 1 else ""
    if row.average is not None:
        each += f"{'; ' * bool(each)}average {format_bytes(row.average)}"
    name = f"<th scope='row'>{escape(row.name)}{_small(escape(row.layout if row.layout != row.name else ''))}</th>"
    ends = [cell(formed(row.wall, format_duration)), f"<td class='folder'>{_link(folder, row)}</td>"]
    figures = (row.speed, row.peak, row.step, row.loss, row.tensors, row.predicted_step, row.predicted_memory)
    if figures == (None,) * len(figures):  # the reason has the room
        return f"<tr>{name}{_status(row, len(HEADS) - 1 - len(ends))}{''.join(ends)}</tr>"
    cells = [
        name,
        _status(row),
        cell(formed(row.speed, format_count), formed(row.speed_per_rank, format_count)),
        cell(formed(row.mfu, "{:.1%}".format), formed(row.utilization, "{:.0%}".format)),
        f"<td>{formed(row.peak, format_bytes) or missing(row)}{_wrapped(each)}</td>",
        _step(row),
        cell(formed(row.loss, "{:.4f}".format), "baseline" if row.is_baseline else formed(row.difference, difference)),
        cell(formed(row.val_loss, "{:.4f}".format), formed(row.val_bits, "{:.4f}".format)),
        cell(planned(row.predicted_step, row.step, seconds)),
        cell(planned(row.predicted_memory, row.tensors, format_bytes), formed(row.tensors, format_bytes)),
        *ends,
    ]
    return f"<tr{_class('best' if row.is_best else '')}>{''.join(cells)}</tr>"


def _status(row: Row, span: int = 1) -> str:
    color = "ok" if row.ok else "bad" if row.status in ("failed", "out of memory") else "warn"
    wide = f" colspan='{span}' style='max-width:none'" if span > 1 else ""
    return f"<td class='why'{wide}><span class='{color}'>{escape(row.status)}</span>{_small(escape(row.reason))}</td>"


def _step(row: Row) -> str:
    """The length of a step, its parts as a bar, and in words."""
    if row.step is None:
        return f"<td>{missing(row)}</td>"
    parts = (("c", row.compute), ("m", row.communication), ("b", row.bubble))
    total = sum(value or 0 for _, value in parts) or 1
    bar = "".join(f"<i class='{kind}' style='width:{(value or 0) / total:.1%}'></i>" for kind, value in parts)
    form = milliseconds if total < 1 else seconds
    words = " + ".join(formed(value, form) or missing(row) for _, value in parts) + (" ms" if total < 1 else "")
    return f"<td>{seconds(row.step)}<span class='bar' title='{words}'>{bar}</span>{_small(words)}</td>"


def milliseconds(value: float) -> str:
    """Without the unit, to a tenth."""
    return f"{1e3 * value:.1f}" if value else "0"


def _link(folder: Path, row: Row) -> str:
    """The run folder, as a link from the page where it is on the same file system."""
    if not row.run_dir:
        return missing(row)
    target = os.path.relpath(run_folder(row, folder), folder.absolute())
    shown = target if len(target) < len(row.run_dir) else row.run_dir
    return f"<a href='{quote(target)}/'><code>{escape(shown)}</code></a>"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    title = escape(picture.title)
    return (
        f"<figure><h3>{title}</h3><img alt='{title}' src='data:image/png;base64,{data}'>"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _class(name: str) -> str:
    return f" class='{name}'" if name else ""


def _small(text: str) -> str:
    return f"<small>{text}</small>" if text else ""


def _wrapped(text: str) -> str:
    return f"<small style='white-space:normal;min-width:150px'>{text}</small>" if text else ""
