"""part=gates: the GPU tests, compute-sanitizer on every kernel, and the whole model's gradients in bf16."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .environment import child_environment
from .report import Part

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/gpu"
SANITIZERS = ("memcheck", "racecheck")
# Program that runs under compute-sanitizer.
ONCE = "import sys; from gpu_bench.sanitized import main; sys.exit(main())"
TAIL = 12  # last lines of a failed gate's output, shown in the report


class Gate(NamedTuple):
    """A command that must exit with 0."""

    name: str
    command: list[str]
    share: float  # largest share of the part's time that it may take


def run(part: Part, options: Arguments) -> None:
    """Run all gates for which this machine has the tools."""
    cuda = options.device == "cuda"
    gradients(part, torch.device(options.device))
    gates = [Gate(f"pytest {options.tests}", pytest_command(options.tests), 0.6 if cuda else 1.0)]
    gates += sanitizers(part) if cuda else []
    environment = {**child_environment(), **({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})}
    for index, gate in enumerate(gates):
        part.progress(index, len(gates), gate.name)
        ended(part, gate, environment)
    part.progress(len(gates), len(gates), "done")


def pytest_command(tests: str) -> list[str]:
    """Return pytest's command line without the project's options, which need plug-ins that may be missing."""
    options = ["-o", "addopts=", "-o", "timeout=600", "--import-mode=importlib", "-m", "not slow and not long", "-q"]
    workers = ["-n", str(min(8, len(os.sched_getaffinity(0))))] if find_spec("xdist") and tests == FOLDER else []
    words = [tests] if Path(tests.partition("::")[0]).exists() else shlex.split(tests)  # a path may have spaces
    return [sys.executable, "-m", "pytest", *options, *workers, "-p", "no:cacheprovider", *words]


def sanitizers(part: Part) -> list[Gate]:
    """Return the gates that run compute-sanitizer. If it is missing, return none and add a line to the report."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        part.text("compute-sanitizer was not run: it is neither on the PATH nor in /usr/local/cuda/bin.")
        return []
    options = ["--error-exitcode", "9", "--kernel-name", "kernel_substring=gptlite"]
    return [
        Gate(f"compute-sanitizer {tool}", [program, "--tool", tool, *options, sys.executable, "-c", ONCE], 0.3)
        for tool in SANITIZERS
    ]


def ended(part: Part, gate: Gate, environment: dict[str, str]) -> None:
    """Run a gate within its time limit, and report its result."""
    limit = min(part.seconds - part.spent, gate.share * part.seconds)
    if limit < 1:
        part.failed(f"{gate.name}: no time left")
        return
    file = part.folder / f"gates-{re.sub(r'[^a-z0-9]+', '-', gate.name.lower())}.log"
    with file.open("w") as log:
        process = subprocess.Popen(
            gate.command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the whole group, with pytest's workers
            process.wait()
            code = None
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    if code is None:
        part.failed(f"{gate.name}: not done after {limit:.0f} s; its last line: {lines[-1].strip()}")
        return
    part.put(gate.name, {"exit_code": code, "last_line": lines[-1].strip()})
    if code:
        part.failed(f"{gate.name}: exit code {code}; {lines[-1].strip()}")
        part.text("```\n" + "\n".join(lines[-TAIL:]) + "\n```")
    else:
        part.text(f"{gate.name}: passed. {lines[-1].strip()}")


def gradients(part: Part, device: torch.device) -> None:
    """Compare the model's bf16 gradients with fp64, for each attention backend and for the reference ops."""
    rows = gradient_rows(device)
    part.table(
        ("attention", "worst error of a gradient", "its parameter", "error of the loss", "allowed", ""),
        [
            (name, f"{row['worst']:.2e}", row["parameter"], f"{row['loss']:.1e}", f"{row['limit']:.2e}", row["verdict"])
            for name, row in rows.items()
        ],
    )
    part.put("gradients", [{"attention": name, **row} for name, row in rows.items()])
    for name, row in rows.items():
        if row["verdict"] not in ("fine", "reference") and not row["verdict"].startswith("not run"):
            part.failed(f"gradients in bf16, attention {name}: {row['verdict']}")


def gradient_rows(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the errors that tests/gpu/test_whole_model.py measures, by attention backend, with verdicts.

    The error of a gradient is relative to that gradient's norm.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu import device as place  # pyright: ignore[reportMissingImports]

    from gptlite.ops.config import OpsConfig
    from gptlite.ops.select import select_ops

    place.DEVICE = device  # before the next import, which copies it
    from gpu import test_whole_model as whole  # pyright: ignore[reportMissingImports]

    ops = select_ops(OpsConfig(), device)
    plain = whole.reference_errors(whole.BF16, 0.0)
    worst = max(plain.keys() - {"loss"}, key=lambda name: plain[name])
    numbers = {"worst": plain[worst], "parameter": worst, "loss": plain["loss"], "limit": plain[worst]}
    rows: dict[str, dict[str, Any]] = {"reference ops": {**numbers, "verdict": "reference"}}
    cases = [each for each in whole.CASES if each.dtype == whole.BF16 and not each.dropout]
    for case in [whole.Case(whole.BF16, whole.Attention.sdpa), *cases]:
        name = case.attention.value + (f", {case.backend.name.lower()}" if case.backend else "")
        nothing = {"worst": float("nan"), "parameter": "", "loss": float("nan"), "limit": float("nan")}
        try:
            errors = whole.errors_of(case, ops)
        except RuntimeError as error:
            missing = "No available kernel" in str(error)
            what = "not run: torch has no such attention kernel here" if missing else str(error).splitlines()[0]
            rows[name] = {**nothing, "verdict": what}
            continue
        limits = whole.limits_of(case)
        # NaN is the worst error.
        worst = max(errors, key=lambda name: errors[name] / limits[name] if errors[name] == errors[name] else torch.inf)
        off = f"{worst} is off by {errors[worst]:.2e}, more than {limits[worst]:.2e}"
        fine = all(errors[name] <= limits[name] for name in errors)  # False for NaN
        numbers = {"worst": errors[worst], "parameter": worst, "loss": errors["loss"], "limit": limits[worst]}
        rows[name] = {**numbers, "verdict": "fine" if fine else off}
    return rows
