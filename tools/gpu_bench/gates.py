"""part=gates: the tests of the GPU, compute-sanitizer over every kernel, and the whole model's gradients in bf16."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from .environment import child_environment
from .gradients import gradient_rows
from .report import Part

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/gpu"
SANITIZERS = ("memcheck", "racecheck")
ONCE = "import sys; from gpu_bench.sanitized import main; sys.exit(main())"
TAIL = 12  # lines of a failure that the report keeps


@dataclass(frozen=True)
class Gate:
    """A command that must end with 0."""

    name: str
    command: list[str]
    share: float  # of the part's time that it may take at most


def run(part: Part, device: torch.device, tests: str) -> None:
    """Runs all gates that this machine has the tools for."""
    gradients(part, device)
    gates = [Gate(f"pytest {tests}", pytest_command(tests), 0.6 if device.type == "cuda" else 1.0)]
    if device.type == "cuda":
        gates += sanitizers(part)
    for index, gate in enumerate(gates):
        part.progress(index, len(gates), gate.name)
        ended(part, gate, device)
    part.progress(len(gates), len(gates), "done")


def pytest_command(tests: str) -> list[str]:
    """Without the project's own options, which ask for plug-ins that may be missing."""
    options = ["-o", "addopts=", "-o", "timeout=600", "--import-mode=importlib", "-m", "not slow and not long", "-q"]
    workers = ["-n", "4"] if find_spec("xdist") and tests == FOLDER else []
    return [sys.executable, "-m", "pytest", *options, *workers, "-p", "no:cacheprovider", *shlex.split(tests)]


def sanitizers(part: Part) -> list[Gate]:
    """compute-sanitizer's runs; where it is missing, nothing, and a line."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        part.text("compute-sanitizer is not on the PATH or in /usr/local/cuda/bin: not run.")
        return []
    options = ["--error-exitcode", "9", "--kernel-name", "kernel_substring=gptlite"]
    return [
        Gate(f"compute-sanitizer {tool}", [program, "--tool", tool, *options, sys.executable, "-c", ONCE], 0.3)
        for tool in SANITIZERS
    ]


def ended(part: Part, gate: Gate, device: torch.device) -> None:
    """Runs a gate, and reports how it ended."""
    limit = min(part.deadline.left, gate.share * part.deadline.seconds)
    if limit < 1:
        part.failed(f"{gate.name}: no time left for it")
        return
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    environment = {**child_environment(), **hidden}
    file = part.folder / f"gates-{re.sub(r'[^a-z0-9]+', '-', gate.name.lower())}.log"
    with file.open("w") as log:
        process = subprocess.Popen(
            gate.command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            part.failed(f"{gate.name}: not done after {limit:.0f} s; its last line: {_last(file)}")
            return
    part.put(gate.name, {"exit_code": code, "last_line": _last(file)})
    if code:
        part.failed(f"{gate.name}: exit code {code}; {_last(file)}")
        part.text("```\n" + "\n".join(file.read_text(errors="replace").splitlines()[-TAIL:]) + "\n```")
    else:
        part.text(f"{gate.name}: passed. {_last(file)}")


def gradients(part: Part, device: torch.device) -> None:
    """The whole model's gradients in bf16 by each attention, against fp64, beside those of the reference ops."""
    rows = gradient_rows(device)
    part.table(
        ("attention", "worst error of a gradient", "its parameter", "error of the loss", "allowed", ""),
        [
            (row.attention, f"{row.worst:.2e}", row.parameter, f"{row.loss:.1e}", f"{row.limit:.2e}", row.verdict)
            for row in rows
        ],
    )
    part.put("gradients", [vars(row) for row in rows])
    for row in rows:
        if row.verdict not in ("fine", "reference") and not row.verdict.startswith("not here"):
            part.failed(f"gradients in bf16, attention {row.attention}: {row.verdict}")


def _last(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
