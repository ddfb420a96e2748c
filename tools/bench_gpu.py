"""Benchmark and correctness report of a GPU in about twenty minutes.

python tools/bench_gpu.py                  # all parts, each in its own process, into one report
python tools/bench_gpu.py part=gates|ceilings|kernels|steps|profile|peer|model [minutes=8] [peer=NANOGPT] [tree=PATH]
    [output=outputs/bench_gpu/DATE] [device=cuda] [size=full] [tests=tests/gpu] [wheels=wheels]
python tools/bench_gpu.py part=wheels      # on a machine with network access: download what the tree needs as wheels

gates: tests/gpu, compute-sanitizer, gradients in bf16 by each attention backend against fp64. ceilings: a copy, a large
product, the head's products. kernels: each kernel and direction alone. steps: GPT-3 Small and XL beside the planner's
prediction. profile: kernels of a step by class, beside their lower bound. peer: nanoGPT (a clone of it). model:
launches, bytes and least time of a step from a trace that needs no GPU, beside those of another source tree (`tree`).

`device=cpu` runs the same code without a GPU, and `size=tiny` with small shapes. A part writes its results at once,
stops itself after `minutes`, and runs from a source tree that is not installed: missing packages are taken from the
wheels in the folder `wheels`. Exit codes: 0 success, 1 something failed, 2 refused.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = (str(ROOT), str(ROOT / "tools"))
sys.path[:0] = [path for path in PYTHON_PATH if path not in sys.path]

from gpu_bench import environment  # noqa: E402


@dataclass
class Arguments:
    """Command-line arguments."""

    part: str = "all"
    device: str = "cuda"
    size: str = "full"
    minutes: float = 8.0
    output: str | None = None
    peer: str | None = None
    tree: str | None = None
    tests: str = "tests/gpu"
    wheels: str = str(ROOT / "wheels")


def main(arguments: Arguments) -> int:
    """Run one part, or all of them. Raises ConfigError."""
    from gpu_bench import parts

    return parts.run(arguments)


if __name__ == "__main__":
    if refusal := environment.prepare(ROOT, sys.argv[1:]):
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
    from gptlite.config.command_line import run_tool

    run_tool(main, Arguments, __doc__)
