"""part=compare, graph and fp8: steps of several implementations, each model of each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .contenders import CONTENDERS
from .environment import child_environment
from .pictures import speeds
from .report import Part, markdown_table

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

MICRO_BATCHES = {"tiny": (2,)}  # of sizes other than these: (4, 16)
HEAD = ("model", "micro-batch", "implementation", "ms a step", "range", "tokens/s", "MFU", "peak GiB", "first s")
LEAST = 12.0  # seconds that must be left for another process
LONGEST = 100.0  # seconds of a process: compiled steps of the largest model


class Race(NamedTuple):
    """Contenders by size, the most informative first, as there may not be time for all. Ratios are to `against`."""

    cells: tuple[tuple[str, str], ...]
    tiny: tuple[str, ...]
    against: tuple[str, ...]
    words: str


KERNELS, REFERENCE, NANOGPT = "kernels", "reference compiled", "nanoGPT compiled"
OURS, THEIRS = "Llama kernels", "transformers' Llama compiled"
RACES = {
    "compare": Race(
        (
            *((who, "small") for who in (KERNELS, NANOGPT, REFERENCE, "kernels compiled")),
            *((who, "xl") for who in (KERNELS, REFERENCE)),
            *((who, "small") for who in (OURS, THEIRS)),
            *((who, "medium") for who in (KERNELS, REFERENCE)),
            *((NANOGPT, size) for size in ("xl", "medium")),
            *(("kernels compiled", size) for size in ("xl", "medium")),
            *((who, size) for size in ("xl", "medium") for who in (OURS, THEIRS)),
            *(("Llama kernels compiled", size) for size in ("small", "xl", "medium")),
        ),
        (KERNELS, NANOGPT, REFERENCE, OURS, THEIRS),
        (REFERENCE, NANOGPT, THEIRS),
        "kernels: ops=fused, eager. reference compiled: ops=reference trainer.compile=true. All models have no biases "
        "and a vocabulary that needs no padding. AdamW, clipping at 1, no data loader, no activation checkpointing.",
    ),
    "graph": Race(
        tuple((who, size) for size in ("small", "xl") for who in (KERNELS, "graph")),
        (KERNELS, "graph"),
        (KERNELS,),
        "graph: as trainer.cuda_graph=auto; kernels: the same without it.",
    ),
    "fp8": Race(
        tuple(
            (who, size)
            for size in ("small", "xl")
            for who in ("bf16 compiled", "bf16, fp8 head, compiled", "fp8, fp8 head, compiled", "fp8 compiled")
        ),
        ("bf16 compiled", "bf16, fp8 head, compiled"),
        ("bf16 compiled",),
        "fp8: precision=fp8 for the blocks; fp8 head: precision.fp8_head=true; compiled: trainer.compile=true.",
    ),
}


def run(part: Part, options: Arguments) -> None:
    """Measure the part's contenders in turn while there is time."""
    race, tiny = RACES[part.name], options.size == "tiny"
    cells = tuple((who, "tiny") for who in race.tiny) if tiny else race.cells
    part.text(
        f"{race.words} Times are medians of several blocks of consecutive steps, each with one wait of the host; the "
        "range is that of the blocks. A column of ratios has the speed in units of that of the named implementation. "
        "The last column has the seconds until the first timed step."
    )
    head = (*HEAD, *(f"/ {name}" for name in race.against))
    rows: list[tuple[str, ...]] = []
    results: list[dict[str, Any]] = []
    part.table(head, rows)
    for index, (who, size) in enumerate(cells):
        part.progress(index, len(cells), f"{who}, {size}")
        if reason := CONTENDERS[who].lacks(options.peer, options.device):
            part.text(f"Not measured: {who}, {size}: {reason}.")
        elif part.seconds - part.spent < LEAST and not tiny:
            part.text(f"Not reached in time: {'; '.join(', '.join(cell) for cell in cells[index:])}.")
            break
        else:
            for result in measured(part, who, size, options):
                results.append({"name": who, "size": size, **result})
                rows[:] = table_rows(results, race.against)
                part.put("results", results)
    part.log(markdown_table(head, rows))
    picture(part, results, race.against)


def measured(part: Part, who: str, size: str, options: Arguments) -> Iterator[dict[str, Any]]:
    """Yield the results of a contender, as its process prints them. A failure is recorded."""
    batches = MICRO_BATCHES.get(size, (4, 16))
    asked = {"name": who, "size": size, "micro_batches": batches, "device": options.device, "peer": options.peer or ""}
    file = part.folder / f"{part.name}-{re.sub(r'[^a-z0-9]+', '-', f'{who}-{size}'.lower())}.log"
    limit = min(LONGEST, max(LEAST, part.seconds - part.spent)) if size != "tiny" else 10 * LONGEST
    done = 0
    with file.open("w") as log:
        process = subprocess.Popen(
            program(asked), stdout=subprocess.PIPE, stderr=log, text=True, env=child_environment(), cwd=part.folder
        )
        with ended_after(process, limit) as over:
            for line in process.stdout or ():
                if line.startswith("{"):
                    done += 1
                    yield json.loads(line)
    if over.is_set():
        part.text(f"Ended after {limit:.0f} s: {who}, {size}, with {done} of {len(batches)} results.")
    elif process.returncode:
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        part.failed(f"{who}, {size}: exit code {process.returncode}; {(lines or ['no output'])[-1].strip()}")


def program(asked: dict[str, Any]) -> list[str]:
    """Return the command of a contender's process."""
    return [sys.executable, "-m", "gpu_bench.contenders", json.dumps(asked)]


@contextmanager
def ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """Context manager that kills a process after a time, and waits for it. The event is set if it was killed."""
    over = threading.Event()

    def kill() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()
        if sys.exc_info()[0] is not None:
            process.kill()
        process.wait()


def table_rows(results: Sequence[dict[str, Any]], against: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of the table, ordered by model and micro-batch. Ratios are of models of one architecture."""
    order = {size: index for index, size in enumerate(("tiny", "small", "medium", "xl"))}
    speed = {(each["size"], each["micro_batch"], each["name"]): each.get("tokens_per_second") for each in results}
    rows = []
    for row in sorted(results, key=lambda row: (order[row["size"]], row["micro_batch"])):
        place, what = (row["size"], row["micro_batch"]), (row["size"], str(row["micro_batch"]), row["name"])
        if "error" in row:
            rows.append((*what, row["error"], *[""] * (len(HEAD) - 4 + len(against))))
            continue
        bases = [speed.get((*place, name)) if comparable(name, row["name"]) else None for name in against]
        ratios = (f"{row['tokens_per_second'] / base:.2f}" if base else "" for base in bases)
        rows.append((*what, *numbers(row), *ratios))
    return rows


def comparable(name: str, other: str) -> bool:
    """Return True if two contenders train the same architecture."""
    return CONTENDERS[name].llama == CONTENDERS[other].llama


def numbers(result: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row from its time on, without ratios."""
    low, high = (f"{result[key] * 1e3:.1f}" for key in ("lowest", "highest"))
    share = "n/a" if result["mfu"] is None else f"{result['mfu']:.1%}"
    rate, memory = f"{result['tokens_per_second']:,.0f}", f"{result['memory'] / 2**30:.1f}"
    return f"{result['seconds'] * 1e3:.1f}", f"{low}-{high}", rate, share, memory, f"{result['first']:.0f}"


def picture(part: Part, results: Sequence[dict[str, Any]], against: Sequence[str]) -> None:
    """Draw the speeds of all contenders for each model and micro-batch, relative to the first of `against` that trains
    the same architecture."""
    groups: dict[str, dict[str, float]] = {}
    for row in results:
        if "error" not in row:
            llama = " Llama" if CONTENDERS[row["name"]].llama else ""
            group = groups.setdefault(f"{row['size']}{llama}, {row['micro_batch']}", {})
            group[row["name"]] = row["tokens_per_second"]
    ratios = {}
    for place, group in groups.items():
        bases = [group[name] for name in against if name in group]
        if bases:
            ratios[place] = {name: rate / bases[0] for name, rate in group.items()}
    if ratios:
        file = part.folder / f"{part.name}.png"
        speeds(file, "Speed of a step, by model and micro-batch", ratios)
        part.picture(file, "Speed of each implementation of a step, relative to the one at 1")
