"""docs/planner_published.md: the planner's step against published runs, row by row, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gptlite.config.cluster import ClusterConfig
from gptlite.files import replacing, write_whole
from plan.published.fit import PRICE, cross_validation, fit
from plan.published.row import Row, recomputed_flops, value_of
from plan.published.tables import DEEPSPEED, MEGATRON, Table
from plan.published.unseen import unseen_rows
from plan.published.world import checked, fitted_error, sheet_error
from plan.published.world_page import world

PICTURE = "pictures/planner_published.png"
GREY, ORANGE, BLUE = "#c3c8d0", "#d1602a", "#2460a7"


def report(splits: int | None = None) -> str:
    """The page, in Markdown. `splits`: of each table's, that are cross-validated; None: all of them."""
    parts = [_head()]
    for table in (MEGATRON, DEEPSPEED):
        fitted = fit(table.rows, table.constants)
        parts += [
            f"## {table.title}\n",
            _rows(table, fitted),
            _errors(table, fitted, splits),
            _constants(table, fitted),
        ]
    return "\n".join([*parts, world(), _unseen()])


def write(page: Path) -> None:
    """The page into that file, and its picture beside it."""
    (page.parent / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    draw(page.parent / PICTURE)
    write_whole(page, report())


def _head() -> str:
    hidden = max(abs(replace(row, hides=True).error()) for row in MEGATRON.rows)
    return f"""# Planner: step time against published runs

The tables compare published throughput with the prediction of `predict` (`gptlite/satellites/plan/cost.py`),
the cost model of [the planner](planner.md). Each row is one published run. `tests/plan/published/` generates this page:

```
cd tests && python -m plan.published                                 # print each row: published, predicted, error
cd tests && python -m plan.published ../docs/planner_published.md    # this page and its picture, 30 seconds
```

The error is the ratio of predicted to published throughput, minus one: `+5%` means that the prediction is 5% too fast.
Throughput is in the unit of the source. Megatron-LM's TFLOP/s include recomputation (arXiv:2104.04473, section 5.1).

- *Error, data sheets*: predicted with the hardware constants of `conf/cluster/`, which were fixed before the first
  comparison. The exceptions are `memory_efficiency`, whose value 0.58 is based on the A100 rows, and the dependence of
  fused attention on the width of heads and the number of keys, which is that of FlashAttention-2's paper since
  2026-11-28.
- *Error, fitted*: predicted after a least-squares fit of a few constants to the rows of the table. Each constant stays
  within the range given below the table. A penalty of {PRICE} d² per constant is added to the sum of squared errors,
  where d is the distance from the middle of the range, as a fraction of the range, on a logarithmic scale.

![Predicted throughput divided by published throughput]({PICTURE})

## Differences from the published runs

Each row is predicted with the shape, layout, schedule, micro-batch, recomputation, dropout and dtype of the run. In the
first two tables, the predicted step differs from the real step in these points:

- **Overlap.** Megatron-LM does not overlap tensor-parallel all-reduces with compute. It overlaps data-parallel
  all-reduces only under torch's DDP (the first four A100 rows). gptlite overlaps both kinds of all-reduces, so
  `cluster.overlap` is set to 0 in all rows except 1.7B. With the preset's value of {MEGATRON.rows[0].sheet().overlap:g}
  in every row, the largest error of the A100 table is {hidden:.1%}.
- **Messages.** Between the pipeline stages of different nodes, each tensor-parallel rank of Megatron-LM sends a
  different part of the activation. In gptlite, each of these ranks sends the whole activation.
- **Fusion.** The prediction is for attention that computes all scores, without skipping masked ones, with a fused
  softmax, as in Megatron-LM of 2021. The version of 2020 (the V100 table) ran scale, mask, softmax, bias, GELU, dropout
  and residual sums as separate ops.
- **Data parallelism.** The published runs all-reduced flat fp16 buffers. The prediction is for FSDP2's collectives and
  copies.
- **Loss scaling.** Copies between fp16 and fp32 and the overflow check are not modelled.
"""


def best_constant(rows: Sequence[Row]) -> float:
    """The largest error of the one FLOP/s a GPU that suits all rows best: what a model has to beat."""
    rates = sorted(
        row.published / row.per_token() * recomputed_flops(row.work.model) / row.work.layout.world_size
        for row in rows
        if row.counted
    )
    middle = 2 * rates[0] * rates[-1] / (rates[0] + rates[-1])
    return max(abs(middle / rate - 1) for rate in rates)


def _rows(table: Table, fitted: ClusterConfig) -> str:
    unit = table.rows[0].unit
    lines = [
        f"| run | tensor x pipeline x data | micro-batch | published, {unit} | error, data sheets | error, fitted |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in table.rows:
        its = row.work.layout
        layout = " x ".join(str(each) for each in (its.size("tp"), its.size("pp"), its.data_size))
        name = row.name if row.counted else f"{row.name} (does not fit, not counted)"
        errors = f"{row.error():+.1%} | {row.error(fitted):+.1%}"
        lines.append(f"| {name} | {layout} | {row.work.micro_batch_size} | {row.published:g} | {errors} |")
    return "\n".join(lines) + "\n"


def _errors(table: Table, fitted: ClusterConfig, splits: int | None) -> str:
    sheets, best = table.errors(), table.errors(fitted)
    results = cross_validation(table.rows, table.constants, splits)
    hardest = max(each.largest for each in results)
    return (
        f"With constants from data sheets, the largest error is {max(sheets):.1%} and the mean error is "
        f"{sum(sheets) / len(sheets):.1%}. With {len(table.constants)} fitted\nconstants, the largest error is "
        f"{max(best):.1%} and the mean error {sum(best) / len(best):.1%}. With constants fitted to one half of the\n"
        f"rows, the largest error on the other half is {hardest:.1%} (maximum over {len(results)} splits). For "
        f"comparison, if all rows\nare predicted with the same FLOP/s per GPU, the largest error is "
        f"{best_constant(table.rows):.1%}.\n"
    )


def _constants(table: Table, fitted: ClusterConfig) -> str:
    lines = ["| constant | data sheet | fitted | range | reason for the range |", "|---|---|---|---|---|"]
    for its in table.constants:
        before, value = value_of(table.rows[0].sheet(), its.key), value_of(fitted, its.key)
        lines.append(f"| `{its.key}` | {before:g} | {value:.3g} | {its.low:g} to {its.high:g} | {its.why} |")
    return "\n".join(lines) + "\n"


def _unseen() -> str:
    lines = [
        "## Unseen runs of other code bases\n",
        "All constants are from data sheets; none is fitted to these runs. The planner does not model compiled code\n"
        "or the additional fused ops of some runs. The loss of FlashAttention's runs reads and writes fp32 logits\n"
        "several times, which has the largest effect on the small model. The layout of the Megatron-LM runs is a\n"
        "guess; these runs overlap tensor-parallel all-reduces with matrix multiplications. nanoGPT and torchtitan\n"
        "are not counted as evidence of accuracy, because their steps differ from the predicted ones; torchtitan's\n"
        "rows above have its settings. MFU with *full attention* counts the FLOPs of all attention scores, including\n"
        "masked ones.\n",
        "| run | GPUs of a cluster preset | published | predicted | error | approximation or source |",
        "|---|---|---|---|---|---|",
    ]
    for row in unseen_rows():
        speeds = f"{row.published:g} {row.unit} | {_figure(row.predicted())} | {row.error():+.1%}"
        hardware = f"{row.work.layout.world_size:,} of `{row.cluster}`"
        lines.append(f"| {row.name} | {hardware} | {speeds} | {row.approximate} |")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def draw(out: Path) -> None:
    """Bars of published, predicted and fitted throughput, one panel a table, and dots of the rows kept for the check,
    into the PNG `out`."""
    figure = Figure(figsize=(11, 11), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    *panels, last = figure.subplots(3, 1)
    for axes, table in zip(panels, (MEGATRON, DEEPSPEED), strict=True):
        _panel(axes, table)
    _dots(last)
    figure.tight_layout()
    with replacing(out) as file:
        figure.savefig(file, format="png")


def _dots(axes: Axes) -> None:
    names = list(checked())
    for place, rows in enumerate(checked().values()):
        for shift, color, of, name in (
            (-0.17, ORANGE, sheet_error, "data sheets"),
            (0.17, BLUE, fitted_error, "fitted"),
        ):
            found = sorted(1 + of(row) for row in rows)
            spots = [place + shift + 0.2 * ((each * 0.618) % 1 - 0.5) for each in range(len(found))]  # side by side
            axes.plot(spots, found, ".", color=color, markersize=4, alpha=0.7, label=None if place else name)
    axes.axhline(1, color=GREY, zorder=0)
    axes.set_xticks(range(len(names)), [_broken(name) for name in names], fontsize=8)
    axes.set_title("Rows kept for the check: throughput over the published", loc="left", fontsize=10, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=2, fontsize=8, frameon=False, loc="upper right")


def _broken(name: str) -> str:
    """A label in two lines."""
    return name.replace(", ", "\n") if ", " in name else name.replace(" on ", "\non ").replace(" of 2022", "\nof 2022")


def _panel(axes: Axes, table: Table) -> None:
    fitted = fit(table.rows, table.constants)
    bars = (
        ("published", GREY, [1.0] * len(table.rows)),
        ("data sheets", ORANGE, [1 + row.error() for row in table.rows]),
        ("fitted", BLUE, [1 + row.error(fitted) for row in table.rows]),
    )
    for shift, (name, color, heights) in enumerate(bars):
        places = [place + (shift - 1) * 0.27 for place in range(len(table.rows))]
        drawn = axes.bar(places, heights, 0.25, color=color, label=name)
        if name != "published":
            axes.bar_label(drawn, [f"{height - 1:+.0%}" for height in heights], fontsize=7, padding=1)
    names = [row.name if row.counted else f"{row.name}\n(not counted)" for row in table.rows]
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8)
    axes.set_ylim(0, 1.25 * max(max(heights) for _, _, heights in bars))
    axes.set_title(f"{table.title}: throughput over the published", loc="left", fontsize=10, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="upper right")
