"""Console output of a run: one ASCII line per log step, with few digits, and an aligned banner.

Columns are aligned across lines, nothing is redrawn and no colour is used, so that the same text is readable in a
terminal, through `tee` and in a Slurm log.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptlite.errors import printable
from gptlite.progress import format_bytes, format_count, format_duration

WIDTH = 80  # columns of a terminal
PART = "val_loss/"  # prefix of the loss of one dataset of a blend
TRAIN_METRIC, VAL_METRIC = "train_", "val_"  # prefixes of a model's own metrics
EXPERT_LOADS = "expert_loads"  # key of a row: tokens of each expert, by layer


def format_parameters(count: int, idle: int = 0) -> str:
    """Format a model's size: `10.5M parameters`, or `10.5M parameters, 4.19M active` for a mixture of experts."""
    return f"{format_count(count)} parameters{f', {format_count(count - idle)} active' if idle else ''}"


def step_line(row: Mapping[str, Any], max_steps: int, eta_seconds: float | None = None, unit: str = "tokens") -> str:
    """Format the line of a training row, of at most WIDTH columns.

    For example: `step  120/1000  loss  3.4512  lr 3.0e-03  norm   0.81  12.3k tok/s  ETA 2m31s`.

    `row` has the keys of a metrics.jsonl row; of the columns shown here, a value that is absent or None is shown as
    n/a. `norm` is the gradient norm. `epoch`, `batch_size`, `loss_scale`, a model's own metrics, MFU and the memory
    each add a column if they are present. Columns that do not fit are left out, the memory first, then the learning
    rate. `unit`: tokens or samples.
    """
    memory, mfu, scale = (row.get(key) for key in ("memory_allocated_bytes", "mfu", "loss_scale"))
    columns = [
        ("", _position("step", row, max_steps)),
        *([("epoch", f"epoch {row['epoch']:.2f}")] if row.get("epoch") is not None else []),
        *([("batch", f"batch {row['batch_size']}")] if "batch_size" in row else []),
        ("", f"loss {_text(row.get('loss'), '{:.4f}'.format, 7)}"),
        *[("own", text) for text in _own(row, TRAIN_METRIC)],
        ("lr", f"lr {_text(row.get('lr'), '{:.1e}'.format, 7)}"),
        ("norm", f"norm {_text(row.get('grad_norm'), _norm, 6)}"),
        *([("scale", f"scale {scale:<6g}")] if scale is not None else []),
        ("", f"{_text(row.get('tokens_per_second'), format_count, 5)} {'tok' if unit == 'tokens' else unit}/s"),
        *([("mfu", f"MFU {mfu:>5.1%}")] if mfu is not None else []),
        *([("memory", f"mem {format_bytes(memory):>8}")] if memory is not None else []),
        ("", f"ETA {_text(eta_seconds, format_duration, 0):<5}"),  # padded, so that each line has the same columns
    ]
    for left_out in ("memory", "lr", "scale", "mfu", "norm", "epoch", "batch", "own"):
        if len("  ".join(text for _, text in columns)) > WIDTH:
            columns = [each for each in columns if each[0] != left_out]
    return "  ".join(text for _, text in columns).rstrip()


def eval_line(row: Mapping[str, Any], max_steps: int, unit: str = "tokens") -> str:
    """Format the line of an evaluation row: `eval  250/1000  val loss  3.6120 nats/token  1.9042 bits/byte`.

    Bits per byte are left out if the data has no text (synthetic tokens). A blend adds the loss of each dataset, and a
    model adds its own metrics.
    """
    loss = f"val loss {_text(row['val_loss'], '{:.4f}'.format, 7)} nats/{unit.removesuffix('s')}"
    columns = [_position("eval", row, max_steps), loss]
    if (bits := row.get("val_bits_per_byte")) is not None:
        columns.append(f"{bits:.4f} bits/byte")
    columns += [
        f"{key.removeprefix(PART)} {_text(row[key], '{:.4f}'.format, 7)}" for key in row if key.startswith(PART)
    ]
    return "  ".join([*columns, *_own(row, VAL_METRIC)])


def banner(lines: list[tuple[str, str]], title: str = "gptlite") -> str:
    """Format keys and values in two columns between horizontal rules, the upper one with the title. Long values wrap.

    An empty key continues the entry above it. Control characters are escaped.
    """
    indent = max((len(key) for key, _ in lines), default=0) + 4
    out = [f"== {title} ".ljust(WIDTH, "=")]
    for key, value in lines:
        out += textwrap.wrap(
            printable(value, "\n"),
            WIDTH,
            initial_indent=f"  {printable(key)}".ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,  # paths and commands must stay copyable
            break_on_hyphens=False,
        ) or [f"  {printable(key)}"]
    return "\n".join([*out, "=" * WIDTH])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "", indent: str = "  ") -> Iterator[str]:
    """Yield lines of aligned columns under a header. The columns named in `right` are right-aligned. Control characters
    are escaped."""
    lines = [list(map(printable, line)) for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned_right = [name in right.split() for name in header]
    for line in lines:
        cells = zip(line, widths, aligned_right, strict=True)
        text = "  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells)
        yield (indent + text).rstrip()


def _own(row: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the columns of a model's own metrics, e.g. `accuracy 0.9312`."""
    keys = [key for key in row if key.startswith(prefix) and not key.startswith(("val_loss", "val_bits_per_byte"))]
    return [f"{key.removeprefix(prefix)} {_text(row[key], '{:.4f}'.format, 6)}" for key in keys]


def _position(name: str, row: Mapping[str, Any], max_steps: int) -> str:
    return f"{name} {row['step']:>{len(str(max_steps))}}/{max_steps}"


def _text(value: float | None, form: Any, width: int) -> str:
    return ("n/a" if value is None else form(value)).rjust(width)


def _norm(number: float) -> str:
    return f"{number:.2f}" if number < 1000 else f"{number:.0e}"
