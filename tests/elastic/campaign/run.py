"""Campaign of seeded losses on network namespaces as nodes (Linux, as root).

    python -m tests.elastic.campaign.run losses=300 seed=1 [out=outputs/campaign] [layout=NAME] [kinds=rank,agent,...]
        [each=6] [steps=600] [seconds=LIMIT] [more='KEY=VALUE ...']

Runs are drawn from the seed and their number, and train with losses until `losses` of them are in OUT/losses.jsonl, or
until `seconds` are over. Called again, it goes on with the next run. `more` are overrides of the runs. Prints the table
by kind, and plots OUT/losses.png. Exits with 1 if a loss or a run is not right.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError

from .check import Row
from .draw import KINDS, LAYOUTS, draw
from .report import plot, read, table
from .trial import run


@dataclass
class Arguments:
    losses: int = 300
    seed: int = 1
    out: str = "outputs/campaign"
    layout: str = ""  # a name of LAYOUTS; "": all, as drawn
    kinds: str = ",".join(KINDS)
    each: int = 6  # losses of a run, at most
    seconds: float = float("inf")
    steps: int = 600  # of a run
    more: str = ""
    keep: bool = False  # keep the folders of runs that are right


def main(arguments: Arguments) -> int:
    """Run until there are enough losses, and print the table."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise ConfigError("the campaign needs root, and ip of iproute2; run it as root on Linux")
    if arguments.layout not in ("", *(names := [layout.name for layout in LAYOUTS])):
        raise ConfigError(f"layout={arguments.layout} is none of {', '.join(names)}")
    if unknown := set(kinds := tuple(arguments.kinds.split(","))) - set(KINDS):
        raise ConfigError(f"kinds={arguments.kinds}: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    out, deadline = Path(arguments.out).resolve(), time.monotonic() + arguments.seconds
    out.mkdir(parents=True, exist_ok=True)
    while (held := _held(out, arguments.seed))[0] < arguments.losses and time.monotonic() < deadline:
        count = min(arguments.each, arguments.losses - held[0])
        plan = replace(draw(arguments.seed, held[1], count, arguments.layout, kinds), steps=arguments.steps)
        shutil.rmtree(out / f"run-{plan.seed}-{plan.number}", ignore_errors=True)  # of an interrupted campaign
        before = len(read(out / "losses.jsonl"))
        result = run(plan, out, partial(_write, out / "losses.jsonl"), tuple(arguments.more.split()))
        _write(out / "runs.jsonl", result)
        new = read(out / "losses.jsonl")[before:]
        if result["ok"] and all(row["ok"] for row in new) and not arguments.keep:
            shutil.rmtree(out / f"run-{plan.seed}-{plan.number}")
        if not new and not result["ok"]:
            break  # a run that does not start: neither would the next
    losses, runs = read(out / "losses.jsonl"), read(out / "runs.jsonl")
    print(table(losses, runs))
    if any("seconds" in row for row in losses):
        plot(losses, out / "losses.png")
    return int(not all(row["ok"] for row in losses + runs))


def _write(path: Path, row: Row) -> None:
    """Append a row, and print it."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def _held(out: Path, seed: int) -> tuple[int, int]:
    """Return how many losses of the seed there are, and the number of its next run."""
    losses, runs = ([row for row in read(out / name) if row["seed"] == seed] for name in ("losses.jsonl", "runs.jsonl"))
    return len(losses), max((row["run"] for row in losses + runs), default=-1) + 1  # not one that was interrupted


if __name__ == "__main__":
    sys.exit(run_tool(main, Arguments, __doc__))
