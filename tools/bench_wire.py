"""Benchmark of runs whose ranks are on machines of their own, joined by links of a given speed (Linux, as root).

python tools/bench_wire.py [machines=2] [links=100mbit,1gbit,none] [steps=24] [skip=4] [out=FOLDER]
    [runs='dense: ; int8: parallelism.compression=int8; ...'] [common='precision=fp32 ...'] [target=LOSS]

A machine is a network namespace with one rank and one thread. All are joined by a bridge, and both directions of each
machine's link are shaped by tc's token bucket. `runs` are names and overrides. Each run trains `steps` steps; its step
time is the median without the first `skip`. Bytes are counted by the kernel on the first machine's link, sent and
received, between the first and the last of these steps. With `target`, the time to a loss is that of all steps until
the mean training loss of 10 steps is at most LOSS. Prints a table, and writes rows.json and the runs' folders.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError

TRAIN = Path(__file__).parents[1] / "train.py"
LINK = "wire0"  # device of a machine
LIMIT_SECONDS = 3600
BUCKET = ("burst", "128kb", "latency", "200ms")
OVER = 10  # steps of a mean loss
CODECS = ("bf16", "int8", "int4")
RUNS = "; ".join(["dense:", *(f"{codec}: parallelism.compression={codec}" for codec in CODECS)])
COMMON = "parallelism=ddp precision=fp32 trainer.eval_interval=0 trainer.eval_samples=16"


@dataclass
class Arguments:
    """Command-line arguments."""

    machines: int = 2
    links: str = "100mbit,1gbit,none"
    steps: int = 24
    skip: int = 4
    runs: str = RUNS
    common: str = COMMON
    target: float | None = None
    out: str = "outputs/wire"


def main(arguments: Arguments) -> None:
    """Run everything and print the table."""
    links, runs = _check(arguments)
    out = Path(arguments.out).resolve()
    rows = []
    numbers = ("s/step", "MB/step", "x dense", "loss", "s to loss")
    print(f"{'link':>8} {'run':<14}" + "".join(f"{name:>10}" for name in numbers), flush=True)
    for link in links:
        with _machines(arguments.machines, link) as names:
            for name, overrides in runs.items():
                folder = out / f"{link}-{name}"
                shutil.rmtree(folder, ignore_errors=True)
                row = _row(arguments, names, [*arguments.common.split(), *overrides], folder)
                reached = seconds_to(arguments.target, row["losses"], row["step_seconds"])
                row |= {"link": link, "run": name, "seconds_to_target": reached}
                dense = next((each["seconds"] for each in rows if each["link"] == link), row["seconds"])
                rows.append(row)
                print(
                    f"{link:>8} {name:<14}{row['seconds']:10.3f}{row['bytes'] / 1e6:10.2f}"
                    f"{dense / row['seconds']:10.2f}{row['loss']:10.4f}{round(reached) if reached else '-':>10}",
                    flush=True,
                )
    (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")


def seconds_to(target: float | None, losses: list[float], seconds: list[float]) -> float | None:
    """Return the seconds of all steps until the mean of OVER losses is at most `target`; None if it never is."""
    for last in range(OVER, len(losses) + 1):
        if target is not None and mean(losses[last - OVER : last]) <= target:
            return sum(seconds[:last])
    return None


def _check(arguments: Arguments) -> tuple[list[str], dict[str, list[str]]]:
    if os.geteuid() != 0 or not shutil.which("tc"):
        raise ConfigError("bench_wire.py needs root, and ip and tc of iproute2; run it as root on Linux")
    if not 0 <= arguments.skip < arguments.steps - 1:
        raise ConfigError(f"skip={arguments.skip} must be 0 or more, and at least 2 below steps={arguments.steps}")
    links = arguments.links.split(",")
    for link in links:
        if not re.fullmatch(r"none|\d+(\.\d+)?[kmg]bit", link):
            raise ConfigError(f"links={arguments.links}: {link} is not a speed; give e.g. 100mbit, 1gbit or none")
    runs = {}
    for text in arguments.runs.split(";"):
        name, colon, overrides = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"runs={arguments.runs!r}: {text.strip()!r} is not NAME: KEY=VALUE ...")
        runs[name.strip()] = overrides.split()
    return links, runs


def _row(arguments: Arguments, names: list[str], overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train on the machines, and return the median step time, the bytes on the first machine's link and the loss."""
    steps = f"trainer.max_steps={arguments.steps}"
    command = ["trainer.log_interval=1", steps, f"run.dir={folder}", "checkpoint.interval=0", *overrides]
    processes = [_start(name, number, len(names), command) for number, name in enumerate(names)]
    counts: dict[int, int] = {}
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or time.monotonic() > deadline:
                break
            if (count := len(_rows(metrics))) >= arguments.skip:
                counts.setdefault(count, _traffic(names[0]))
            time.sleep(0.01)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    if any(process.returncode for process in processes):
        raise ConfigError(f"the run in {folder} failed: read {folder}.log")
    rows = _rows(metrics)
    first, last = min(counts), max(count for count in counts if count < arguments.steps)
    return {
        "seconds": median(row["step_seconds"] for row in rows[arguments.skip :]),
        "bytes": (counts[last] - counts[first]) / max(1, last - first),
        "loss": rows[-1]["loss"],
        "losses": [row["loss"] for row in rows],
        "step_seconds": [row["step_seconds"] for row in rows],
    }


def _rows(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [row for row in rows if "step_seconds" in row]


def _start(name: str, number: int, machines: int, command: list[str]) -> subprocess.Popen[bytes]:
    folder = next(each.partition("=")[2] for each in command if each.startswith("run.dir="))
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", "--nproc-per-node=1"),
        *(f"--node-rank={number}", "--master-addr=10.79.0.1", "--master-port=29578"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    with open(f"{folder}.log" if number == 0 else os.devnull, "wb") as log:
        words = ["ip", "netns", "exec", name, *torchrun, str(TRAIN), *command]
        return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _traffic(name: str) -> int:
    """Return the bytes sent and received on a machine's link."""
    text = subprocess.run(["ip", "-n", name, "-s", "-j", "link", "show", LINK], capture_output=True, check=True).stdout
    (entry,) = json.loads(text)
    return entry["stats64"]["rx"]["bytes"] + entry["stats64"]["tx"]["bytes"]


@contextmanager
def _machines(count: int, link: str) -> Iterator[list[str]]:
    """Namespaces joined by a bridge, in a namespace of its own, over links of a speed. All are deleted at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    switch = f"wire-{os.getpid()}"
    names = [f"{switch}-{number}" for number in range(count)]
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ends = ("name", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "link", "add", *ends)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"10.79.0.{number + 1}/24", "dev", LINK)
            for device in (LINK, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if link != "none":
                for place, device in ((name, LINK), (switch, port)):
                    shaped = ("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", link, *BUCKET)
                    _run("ip", "netns", "exec", place, *shaped)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
