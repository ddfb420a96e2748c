"""Runs the parts: one here, or all in turn, each in a process of its own, so that none can take another down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

import torch

from gptlite.errors import ConfigError, did_you_mean

from .environment import child_environment
from .report import PARTS, Deadline, Part, assemble

# Minutes of each where all run, after the kernels were built; together at most 20.
SHARES = {"gates": 4.5, "ceilings": 0.7, "kernels": 3.3, "steps": 5.0, "profile": 1.5, "peer": 2.0, "model": 1.5}
BUILD = 1.5
GRACE = 15.0  # seconds over its time after which a part is ended
CPU_PARTS = ("gates", "model")  # that say something of use without a GPU at full size


class Options(Protocol):
    """The command line, see tools/bench_gpu.py."""

    part: str
    device: str
    size: str
    minutes: float
    output: str | None
    peer: str | None
    tree: str | None
    tests: str
    wheels: str


def run(options: Options) -> int:
    """Runs what is asked for. Returns the exit code. Raises ConfigError."""
    check(options)
    folder = Path(options.output or f"outputs/bench_gpu/{time.strftime('%Y-%m-%d_%H-%M-%S')}").expanduser()
    return _all(options, folder) if options.part == "all" else _one(options, folder)


def check(options: Options) -> None:
    """Raises ConfigError, one line, for what cannot run here."""
    names = (*PARTS, "all", "wheels")
    if options.part not in names:
        raise ConfigError(f"part={options.part} is not one of {', '.join(names)}{did_you_mean(options.part, names)}")
    if options.device not in ("cuda", "cpu"):
        raise ConfigError(f"device={options.device} is neither cuda nor cpu")
    if options.size not in ("full", "tiny"):
        raise ConfigError(f"size={options.size} is neither full nor tiny")
    if not 0 < options.minutes <= 600:
        raise ConfigError(f"minutes={options.minutes:g} must be above 0 and at most 600")
    if options.peer and not (Path(options.peer).expanduser() / "model.py").is_file():
        raise ConfigError(f"peer={options.peer} holds no model.py; give a clone of nanoGPT")
    if options.part == "peer" and not options.peer:
        raise ConfigError("part=peer needs peer=NANOGPT, a clone of nanoGPT")
    if options.tree and not (Path(options.tree).expanduser() / "gptlite" / "__init__.py").is_file():
        raise ConfigError(f"tree={options.tree} is no source tree of gptlite")
    if options.part != "model" and options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"part={options.part}: torch {torch.__version__} finds no GPU; part=model needs none, and device=cpu "
            "runs part=gates, or with size=tiny any part, on the CPU"
        )
    if options.device == "cpu" and options.size == "full" and options.part not in CPU_PARTS:
        raise ConfigError(f"part={options.part} device=cpu would take hours at full size; add size=tiny")


def _all(options: Options, folder: Path) -> int:
    """Every part with its share of the time. A part that fails or hangs is recorded, and the rest goes on."""
    names = [name for name in PARTS if name != "peer" or options.peer]
    started = time.monotonic()
    _build_kernels()
    for index, name in enumerate(names):
        spent, left = time.monotonic() - started, 60 * sum(SHARES[each] for each in names[index:])
        print(f"== {name} ({index + 1} of {len(names)}); {spent:.0f} s so far, ETA at most {left:.0f} s", flush=True)
        _in_a_process(options, name, folder)
        assemble(folder, words(options))
    print(f"written: {assemble(folder, words(options))}; {time.monotonic() - started:.0f} s in all")
    return int(any(_failures(folder, name) for name in names))


def _build_kernels() -> None:
    """Compiles them before the parts' time runs. What goes wrong here the parts say: this fails nothing."""
    print(f"== building the kernels, where they are not; at most {60 * BUILD:.0f} s", flush=True)
    command = [sys.executable, "-m", "gptlite.kernels", "build"]
    try:
        subprocess.run(command, env=child_environment(), timeout=60 * BUILD)
    except subprocess.TimeoutExpired:
        print("the kernels are not built yet: the first part goes on with it", flush=True)


def _in_a_process(options: Options, name: str, folder: Path) -> None:
    program = Path(__file__).resolve().parents[1] / "bench_gpu.py"
    minutes = min(options.minutes, SHARES[name])
    given = {"part": name, "minutes": minutes, "output": folder, "device": options.device, "size": options.size}
    given |= {"tests": options.tests, **{k: v for k in ("peer", "tree") if (v := getattr(options, k))}}
    command = [sys.executable, str(program), *(f"{key}={value}" for key, value in given.items())]
    for before in (folder / f"{name}.json", folder / f"{name}.md"):  # of an earlier run into the same folder
        before.unlink(missing_ok=True)
    limit = 60 * minutes + GRACE
    process = subprocess.Popen(command, env=child_environment())
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = -1
    if code == -1 or (code and not _failures(folder, name)):
        why = f"was ended after {limit:.0f} s" if code == -1 else f"ended with exit code {code} and said no more"
        _record(folder, name, f"the part {why}")


def _record(folder: Path, name: str, failure: str) -> None:
    """Adds a failure to what a part, which is gone, has written."""
    file, section = folder / f"{name}.json", folder / f"{name}.md"
    if not file.exists():
        Part(folder, name, Deadline(0)).failed(failure)
        return
    data = json.loads(file.read_text())
    data["failures"].append(failure)
    file.write_text(json.dumps(data, indent=1))
    section.write_text(section.read_text() + f"\n**Failed:** {failure}\n")
    print(f"{name}: FAILED: {failure}", flush=True)


def _failures(folder: Path, name: str) -> list[str]:
    """What a part has recorded; nothing where it has written nothing, see `_record`."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["failures"] if file.exists() else []


def _one(options: Options, folder: Path) -> int:
    part = Part(folder, options.part, Deadline(options.minutes), log=lambda line: print(line, flush=True))
    try:
        _dispatch(part, options)
    except ConfigError:
        raise
    except Exception as error:
        traceback.print_exc()
        words_of_it = (str(error).strip() or type(error).__name__).splitlines()[0]
        part.failed(f"{type(error).__name__}: {words_of_it}")
    part.flush()
    print(f"written: {assemble(folder, words(options))}")
    return int(bool(part.failures))


def _dispatch(part: Part, options: Options) -> None:
    """Imports the part's module alone, and runs it."""
    device, tiny = torch.device(options.device), options.size == "tiny"
    match part.name:
        case "gates":
            from . import gates

            gates.run(part, device, options.tests)
        case "ceilings":
            from . import ceilings

            ceilings.run(part, device, tiny)
        case "kernels":
            from . import kernel_rows

            kernel_rows.run(part, device, tiny)
        case "steps":
            from . import steps

            steps.run(part, device, tiny)
        case "profile":
            from . import profiled

            profiled.run(part, device, tiny)
        case "peer":
            from . import peer

            peer.run(part, device, tiny, Path(options.peer or "").expanduser())
        case "model":
            from . import model_part

            tree = str(Path(options.tree).expanduser()) if options.tree else None
            model_part.run(part, ("tiny",) if tiny else ("small", "xl"), tree)


def words(options: Options) -> str:
    """What this was taken on, and when."""
    device = "the CPU alone"
    if options.device == "cuda" and torch.cuda.is_available():
        its = torch.cuda.get_device_properties(0)
        device = f"{its.name}, {its.total_memory / 2**30:.0f} GiB, {its.multi_processor_count} multiprocessors"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{when}, {device}, torch {torch.__version__}, Python {sys.version.split()[0]}."
