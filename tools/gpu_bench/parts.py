"""Runner of the parts: one part in this process, or all in sequence, each in a separate process to isolate crashes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from nanogpt import check_clone

from gptlite.errors import ConfigError, did_you_mean
from gptlite.progress import format_duration

from .environment import child_environment
from .gates import FOLDER
from .report import Part, add_failure, assemble

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

# Maximum minutes of each part if all run. With BUILD, the minutes to build the kernels, they add up to 20.
SHARES = {"gates": 4.5, "ceilings": 0.7, "kernels": 3.3, "steps": 5.0, "profile": 1.5, "peer": 2.0, "model": 1.5}
# Maximum minutes of each part of part=session, which fits in a loan of 15 minutes with the build of the kernels.
SESSION = {"gates": 2.0, "compare": 5.0, "graph": 1.2, "fp8": 1.8, "kernels": 2.0}
PLANS = {"all": SHARES, "session": SESSION}
NEW_TESTS = f"{FOLDER} -k 'window or graph or fp8 or head or segments or token or amax or adamw'"  # for part=session
BUILD = 1.5
GRACE = 15.0  # seconds after a part's time limit until it is killed
CPU_PARTS = ("gates", "model")  # parts that a CPU can run at full size
# Modules whose name differs from that of their part.
MODULES = {"kernels": "kernel_rows", "profile": "profiled", "model": "model_part", "graph": "compare", "fp8": "compare"}


def run(options: Arguments) -> int:
    """Run the requested parts. Returns the exit code. Raises ConfigError."""
    check(options)
    folder = Path(options.output or f"outputs/bench_gpu/{time.strftime('%Y-%m-%d_%H-%M-%S')}").expanduser()
    return _all(options, folder) if options.part in PLANS else _one(options, folder)


def check(options: Arguments) -> None:
    """Raise ConfigError for options that cannot run here."""
    names = (*dict.fromkeys((*SHARES, *SESSION)), *PLANS, "wheels")
    if options.part not in names:
        raise ConfigError(f"part={options.part} is not one of {', '.join(names)}{did_you_mean(options.part, names)}")
    if options.device not in ("cuda", "cpu"):
        raise ConfigError(f"device={options.device} is neither cuda nor cpu")
    if options.size not in ("full", "tiny"):
        raise ConfigError(f"size={options.size} is neither full nor tiny")
    if not 0 < options.minutes <= 600:
        raise ConfigError(f"minutes={options.minutes:g} must be above 0 and at most 600")
    if options.peer:
        check_clone(options.peer)
    if options.part == "peer" and not options.peer:
        raise ConfigError("part=peer needs peer=NANOGPT, a clone of nanoGPT")
    if options.tree and not (Path(options.tree).expanduser() / "tools" / "gpu_bench").is_dir():
        raise ConfigError(f"tree={options.tree} is not a source tree of gptlite with tools/gpu_bench")
    if options.part != "model" and options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"part={options.part}: torch {torch.__version__} finds no GPU; give part=model, which needs none, or "
            "device=cpu, which runs part=gates, or any part with size=tiny"
        )
    if options.device == "cpu" and options.size == "full" and options.part not in CPU_PARTS:
        raise ConfigError(f"part={options.part} device=cpu would take hours at full size; add size=tiny")


def _all(options: Arguments, folder: Path) -> int:
    """Run every part of a plan within its time limit. If a part fails or hangs, this is recorded, and the next part
    runs."""
    shares = PLANS[options.part]
    names = [name for name in shares if name != "peer" or options.peer]
    if options.part == "session" and options.tests == FOLDER:
        options = replace(options, tests=NEW_TESTS)
    started = time.monotonic()
    _build_kernels()
    for index, name in enumerate(names):
        spent, left = time.monotonic() - started, 60 * sum(shares[each] for each in names[index:])
        so_far = f"{format_duration(spent)} so far, ETA at most {format_duration(left)}"
        print(f"== {name} ({index + 1} of {len(names)}); {so_far}", flush=True)
        _in_a_process(options, name, folder, shares[name])
        assemble(folder, words(options))
    print(f"written: {assemble(folder, words(options))}; {format_duration(time.monotonic() - started)} in all")
    return int(any(_failures(folder, name) for name in names))


def _build_kernels() -> None:
    """Build the kernels before the parts' time starts. Errors are ignored here, as the parts report them."""
    print(f"== building the kernels if needed; at most {60 * BUILD:.0f} s", flush=True)
    command = [sys.executable, "-m", "gptlite", "kernels", "build"]
    try:
        subprocess.run(command, env=child_environment(), timeout=60 * BUILD)
    except subprocess.TimeoutExpired:
        print("the build of the kernels is not finished in time; the first part will build them", flush=True)


def _in_a_process(options: Arguments, name: str, folder: Path, share: float) -> None:
    program = Path(__file__).resolve().parents[1] / "bench_gpu.py"
    minutes = min(options.minutes, share)
    given = {"part": name, "minutes": minutes, "output": folder, "device": options.device, "size": options.size}
    given |= {"tests": options.tests, **{k: v for k in ("peer", "tree") if (v := getattr(options, k))}}
    command = [sys.executable, str(program), *(f"{key}={value}" for key, value in given.items())]
    for ending in ("json", "md"):  # results of an earlier run in the same folder
        (folder / f"{name}.{ending}").unlink(missing_ok=True)
    limit = 60 * minutes + GRACE
    try:
        code = subprocess.run(command, env=child_environment(), timeout=limit).returncode
    except subprocess.TimeoutExpired:
        add_failure(folder, name, f"the part was ended after {limit:.0f} s")
        return
    if code and not _failures(folder, name):
        add_failure(folder, name, f"the part ended with exit code {code} and no message")


def _failures(folder: Path, name: str) -> list[str]:
    """Return the failures that a part has recorded."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["failures"] if file.exists() else []


def _one(options: Arguments, folder: Path) -> int:
    part = Part(folder, options.part, options.minutes, partial(print, flush=True))
    try:
        import_module(f".{MODULES.get(part.name, part.name)}", __package__).run(part, options)
    except ConfigError:
        raise
    except Exception as error:
        traceback.print_exc()
        part.failed(f"{type(error).__name__}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    part.flush()
    print(f"written: {assemble(folder, words(options))}")
    return int(bool(part.failures))


def words(options: Arguments) -> str:
    """Return a line with the time of the measurement, the device and the versions."""
    device = "CPU only"
    if options.device == "cuda" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        device = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} multiprocessors"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{when}, {device}, torch {torch.__version__}, Python {sys.version.split()[0]}."
