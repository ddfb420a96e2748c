"""Benchmark and correctness report for a GPU, in about twenty minutes.

python tools/bench_gpu.py                  # run the first seven parts, each in a separate process; write one report
python tools/bench_gpu.py part=session     # run the parts for a GPU that is at hand for 15 minutes, in order
python tools/bench_gpu.py part=gates|ceilings|kernels|steps|profile|peer|model|compare|graph|fp8 [minutes=8]
    [peer=NANOGPT] [tree=PATH] [output=outputs/bench_gpu/DATE] [device=cuda] [size=full] [tests=tests/gpu]
    [wheels=wheels]
python tools/bench_gpu.py part=wheels      # download the required packages as wheels; needs network access

gates     tests/gpu, compute-sanitizer, and bf16 gradients of each attention backend compared with fp64
ceilings  throughput of a copy, of a large GEMM and of the output head's GEMMs
kernels   time of each kernel, forward and backward
steps     training steps of GPT-3 Small and XL, compared with the planner's prediction
profile   kernels of a step by class, compared with their lower bound
peer      training steps of nanoGPT, from the clone `peer`
model     launches, bytes and minimum time of a step, from a trace that needs no GPU; `tree`: also of that source tree
compare   steps of our kernels, of compiled reference ops, of nanoGPT (`peer`) and of transformers' Llama
graph     steps with and without a CUDA graph
fp8       steps with blocks and head in bf16 and fp8

`device=cpu` runs without a GPU, and `size=tiny` uses small shapes. Each part writes results as they arrive, and stops
after `minutes`. gptlite need not be installed: missing packages are taken from the folder `wheels`. Exit codes:
0 success, 1 a part failed, 2 refused.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = (str(ROOT), str(ROOT / "tools"))
sys.path[:0] = [path for path in PYTHON_PATH if path not in sys.path]

from gpu_bench import environment  # noqa: E402
from gpu_bench.arguments import Arguments  # noqa: E402


def main(arguments: Arguments) -> int:
    """Run one part, or all, and return the exit code. Raises ConfigError for invalid arguments."""
    from gpu_bench import parts

    return parts.run(arguments)


if __name__ == "__main__":
    if refusal := environment.prepare(ROOT, sys.argv[1:]):
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
    from gptlite.config.command_line import run_tool

    run_tool(main, Arguments, __doc__)
