"""The part of docs/planner_published.md on stacks with factors of their own, and on rows kept for the check."""

from __future__ import annotations

from plan.published.row import Row
from plan.published.stacks import FACTORS, fitted_rows, places
from plan.published.world import BLOOM, PRESETS, Errors, checked, fitted_error, rank_correlation, sheet_error, spread

FURTHEST = 5  # of MPT's rows on a device, which are too many to list


def world() -> str:
    """The sections, in Markdown."""
    return "\n".join([_fitted(), _factors(), _checked(), _rows_checked(), _spreads()])


def _fitted() -> str:
    rows, number = fitted_rows(), len(FACTORS)
    sheets, fitted = (Errors.of([of(row) for row in rows]) for of in (sheet_error, fitted_error))
    lines = [
        f"""## Other stacks

A stack is a code base with its settings. llm-foundry trained MPT, and torchtitan Llama 3.1, with other kernels than
gptlite's. {number} factors describe these stacks; none is of a single run. They were fitted to the {len(rows)} rows of
the next table, with the same penalty as above. Here, *data sheets* are the presets and what a source says of its
machine and code: a limit of 500 W, 2,400 GB/s, a network card per GPU, FlashAttention-2 on H100s, flat parameters,
products that are computed again (`tests/plan/published/mpt.py`, `titan.py`, `megatron.py`).

| run | published, tokens/s per GPU | error, data sheets | error, fitted |
|---|--:|--:|--:|""",
        *(_line(row) for row in rows),
    ]
    lines.append(f"| mean of the sizes | | {sheets.mean:.1%} | {fitted.mean:.1%} |")
    lines.append(f"| mean | | {sheets.bias:+.1%} | {fitted.bias:+.1%} |")
    return "\n".join(lines) + "\n"


def _line(row: Row, unit: bool = False) -> str:
    published = f"{float(f'{row.published:.5g}'):g}{f' {row.unit}' * unit}"
    return f"| {row.name} | {published} | {sheet_error(row):+.1%} | {fitted_error(row):+.1%} |"


def _factors() -> str:
    lines = ["| key | stacks | fitted | range | reason for the range |", "|---|---|--:|---|---|"]
    for its, place in zip(FACTORS, places(), strict=True):
        stacks = its.stack if isinstance(its.stack, str) else ", ".join(its.stack)
        keys = ", ".join(f"`{key}`" for key in its.key.split())
        value = f"{'times ' * its.times}{its.at(place):.3g}"
        lines.append(f"| {keys} | {stacks} | {value} | {its.low:g} to {its.high:g} | {its.why} |")
    return "\n".join(lines) + "\n"


def _checked() -> str:
    lines = [
        """## Rows kept for the check

Nothing was fitted to these rows, but they were looked at while the model's form changed: those of MPT and torchtitan
three times, the others twice. After the first time, separate ops got a factor of their bytes instead of a lower
bandwidth, casts to fp8 the bytes of fused ones, Megatron-Core its overlap, and BLOOM the stragglers and the congestion
fitted to the other stacks. After the second, FlashAttention-2's rate on H100s and the transfers that DTensor does not
make were added from their sources, and attention got a factor per device. Megatron-LM's selective rows got the
transfers that they do not wait for after their first look. Last, FlashAttention-2's rate on A100s was corrected to that
of its kernel, which left the errors of MPT nearly as they were. No value was chosen by these rows.

| rows | number | data sheets: mean of the sizes | mean | largest | fitted: mean of the sizes | mean | largest |
|---|--:|--:|--:|--:|--:|--:|--:|""",
    ]
    for name, rows in checked().items():
        sheets, fitted = (Errors.of([of(row) for row in rows]) for of in (sheet_error, fitted_error))
        lines.append(f"| {name} | {len(rows)} | {sheets.cells()} | {fitted.cells()} |")
    order = f"{rank_correlation(checked()[BLOOM]):.2f}"
    lines.append(
        f"""
The predicted order of BLOOM's layouts has a rank correlation of {order} with the published one. For BLOOM's rows and
Megatron-LM's of 2022, *fitted* are the constants of the table of 2021, and BLOOM's have `straggle` and `congestion`.
Micro-batches and stages per rank of Megatron-Core's rows are guesses, and it has no factors of its own. torchtitan's
context parallelism passes keys around a ring, while gptlite gathers them."""
    )
    return "\n".join(lines) + "\n"


def _rows_checked() -> str:
    lines = [
        f"Of MPT's rows, these are the {FURTHEST} with the largest errors on each device. `python -m plan.published`\n"
        "prints all.\n",
        "| run | published | error, data sheets | error, fitted |",
        "|---|--:|--:|--:|",
    ]
    for name, rows in checked().items():
        if name.startswith("MPT"):
            rows = sorted(rows, key=lambda row: -abs(fitted_error(row)))[:FURTHEST]
        lines += [_line(row, unit=True) for row in rows]
    return "\n".join(lines) + "\n"


def _spreads() -> str:
    lines = [
        """## Clusters on which gptlite was never measured

A plan for such a cluster says so, and how long published runs of other code took relative to their planned time (*data
sheets*): nine of ten took between *low* and *high*, of all runs on this page that are counted.

| preset | low | high |
|---|--:|--:|""",
        *(f"| `{name}` | {low:g} | {high:g} |" for name in PRESETS for low, high in [spread(name)]),
    ]
    return "\n".join(lines) + "\n"
