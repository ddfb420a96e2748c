"""Report of a campaign: the table by kind of loss, and the histogram of seconds to the next step."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from .draw import KINDS

Row = dict[str, Any]
WORDS = {
    "rank": "kill -9 of a rank",
    "agent": "kill -9 of an agent",
    "cable": "cable cut",
    "frozen": "frozen node",
    "two": "two at once",
    "save": "during a save to disk",
    "memory_save": "during a save to memory",
    "restore": "during a restore",
    "rejoin": "during a rejoin",
}
HEAD = "count | right | spare | detected, s | mean, s | worst, s | repeated steps | from memory | back, s |"


def read(path: Path) -> list[Row]:
    """Return the rows of a JSONL file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(losses: list[Row], runs: list[Row]) -> str:
    """Return the table for docs/benchmarks_systems.md, by kind and by layout, and a line on the runs."""
    lines = [f"| loss | {HEAD}", "|---" * 10 + "|"]
    for kind in KINDS:
        if rows := [row for row in losses if row["kind"] == kind]:
            lines.append(_line(WORDS[kind], rows))
    lines.append(_line("all", losses))
    lines += ["", f"| layout | {HEAD}", "|---" * 10 + "|"]
    for name in sorted({row["layout"] for row in losses}):
        lines.append(_line(name, [row for row in losses if row["layout"] == name]))
    right = sum(row["ok"] for row in runs)
    seconds = sum(row["wall"] for row in runs)
    lines += ["", f"{len(runs)} runs, {right} of them right to the end, in {seconds / 60:.0f} minutes"]
    wrong = [row for row in losses + runs if not row["ok"]]
    lines += [f"- {row.get('kind', 'run')} {row['layout']} run {row['run']}: {row['reason']}" for row in wrong[:40]]
    return "\n".join(lines)


def _line(name: str, rows: list[Row]) -> str:
    numbers = {key: [row[key] for row in rows if row.get(key) is not None] for key in ("detected", "seconds", "back")}
    repeats = [row["repeated"] for row in rows if "repeated" in row]
    memory = sum(row.get("from") == "memory" for row in rows)
    cells = [
        name,
        str(len(rows)),
        str(sum(row["ok"] for row in rows)),
        str(sum(row.get("from") == "nothing" for row in rows)),
        f"{median(numbers['detected']):.1f}" if numbers["detected"] else "-",
        f"{mean(numbers['seconds']):.1f}" if numbers["seconds"] else "-",
        f"{max(numbers['seconds']):.1f}" if numbers["seconds"] else "-",
        f"{mean(repeats):.1f}" if repeats else "-",
        str(memory),
        f"{mean(numbers['back']):.1f}" if numbers["back"] else "-",
    ]
    return f"| {' | '.join(cells)} |"


def plot(losses: list[Row], path: Path) -> None:
    """Draw a histogram of the seconds from a loss to the next step, one row for each kind."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    timed = {kind: [r["seconds"] for r in losses if r["kind"] == kind and "seconds" in r] for kind in KINDS}
    timed = {kind: seconds for kind, seconds in timed.items() if seconds}
    most = max(map(max, timed.values()))
    edges = [most * number / 40 for number in range(41)]
    figure, axes = plt.subplots(len(timed), 1, sharex=True, figsize=(7, 0.8 * len(timed) + 1), squeeze=False)
    for (kind, seconds), axis in zip(timed.items(), axes[:, 0], strict=True):
        axis.hist(seconds, bins=edges, color="#4477aa")
        axis.axvline(median(seconds), color="#cc3311", linewidth=1)
        axis.set_ylabel(f"{WORDS[kind]}\n{len(seconds)}", rotation=0, ha="right", va="center", fontsize=8)
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds from a loss to the next step (red: median)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
