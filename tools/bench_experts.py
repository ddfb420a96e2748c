"""Benchmark of an expert layer: grouped GEMMs, a loop over experts, and a single GEMM of equal FLOPs.

python tools/bench_experts.py [repeats=15]

Each call is a forward and a backward pass in bf16 on the CPU. Results are medians of interleaved calls. The GEMMs are
an expert's two linear layers, without the activation. `dispatch` sorts the tokens by expert, gathers their rows and
computes the weighted sum of the experts' outputs. Its time in all layers is also printed as a fraction of a step: the
forward and backward pass of a GPT with 6 layers, a vocabulary of 8192, 6 heads and sequences of 256.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from timing import in_turn, seconds

from gptlite.config.command_line import run_tool
from gptlite.launch.process import keep_freed_memory

EXPERTS, TOP_K, D_MODEL, D_FF, TOKENS, LAYERS = 8, 2, 384, 768, 2048, 6


@dataclass
class Arguments:
    """Command-line arguments."""

    repeats: int = 15


def main(arguments: Arguments) -> None:
    """Print the times and ratios."""
    keep_freed_memory()  # as training does, before any tensor is created
    calls = {name: partial(seconds, call) for name, call in contenders().items()}
    found = in_turn(calls, arguments.repeats)
    times = {name: median(each) for name, each in found.items()}
    for name, each in times.items():
        print(f"{name:18s} {1e3 * each:9.2f} ms")
    print(f"grouped / loop, time          {times['grouped'] / times['loop']:.2f}")
    print(f"grouped / one product, speed  {times['one product'] / times['grouped']:.2f}")
    print(f"dispatch, fraction of a step  {LAYERS * times['dispatch'] / times['step']:.1%}")


def contenders() -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by name."""
    import torch
    import torch.nn.functional as F

    from gptlite.models.gpt.config import GPTConfig, MoEConfig, Norm, Position
    from gptlite.models.gpt.model import GPT, prepare_part
    from gptlite.ops.config import OpsConfig
    from gptlite.ops.experts import Dispatch, grouped_linear
    from gptlite.ops.select import select_ops
    from gptlite.precision import Precision, PrecisionConfig, resolve_precision

    torch.manual_seed(0)
    cpu, random = torch.device("cpu"), partial(torch.randn, dtype=torch.bfloat16)
    x = random(TOKENS, D_MODEL)
    up, down = random(EXPERTS, D_FF, D_MODEL), random(EXPERTS, D_MODEL, D_FF)
    weights, chosen = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
    dispatch = Dispatch.of(chosen, EXPERTS)
    rows = dispatch.rows(x)  # one row per token and chosen expert, sorted by expert

    def both(forward: Callable[..., Any], *inputs: Any) -> Callable[[], None]:
        leaves = [each.clone().requires_grad_() for each in inputs]

        def call() -> None:
            out = forward(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        return call

    def experts(fused: bool) -> Callable[..., Any]:
        return lambda rows, up, down: grouped_linear(
            grouped_linear(rows, up, dispatch.ends, fused), down, dispatch.ends, fused
        )

    def dispatched(x: Any, weights: Any) -> Any:
        each = Dispatch.of(chosen, EXPERTS)
        return each.combined(each.rows(x), weights)

    moe = MoEConfig(experts=EXPERTS, top_k=TOP_K, d_ff=D_FF)
    sizes = {"num_layers": LAYERS, "num_heads": 6, "d_model": D_MODEL, "vocab_size": 8192, "sequence_length": 256}
    kind = {"position": Position.rope, "norm": Norm.rms_norm, "bias": False}
    model = GPT(GPTConfig(moe=moe, **sizes, **kind), select_ops(OpsConfig(), cpu))
    prepare_part(model, resolve_precision(PrecisionConfig(dtype=Precision.bf16), cpu), recomputes=False)
    tokens = torch.randint(8192, (TOKENS // 256, 256))

    def step() -> None:
        model(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    return {
        "grouped": both(experts(True), rows, up, down),
        "loop": both(experts(False), rows, up, down),
        "one product": both(lambda rows, up, down: F.linear(F.linear(rows, up), down), rows, up[0], down[0]),
        "dispatch": both(dispatched, x, weights),
        "step": step,
    }


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
