"""Benchmark of an expert layer: grouped GEMMs, a loop over experts, and a single GEMM of equal FLOPs.

python tools/bench_experts.py [experts=8] [top_k=2] [d_model=384] [d_ff=768] [tokens=2048] [layers=6] [precision=bf16]
    [repeats=15]

Each call is a forward and a backward pass on the CPU. Results are medians of interleaved calls. The GEMMs are an
expert's two linear layers, without the activation. `dispatch` sorts the tokens by expert, gathers their rows and
computes the weighted sum of the experts' outputs. Its time in all layers is also printed as a fraction of a step: the
forward and backward pass of a GPT with `layers` layers, a vocabulary of 8192, 6 heads and sequences of 256.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from timing import in_turn, seconds

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.launch.launcher import keep_freed_memory


@dataclass
class Arguments:
    """Command-line arguments."""

    experts: int = 8
    top_k: int = 2
    d_model: int = 384
    d_ff: int = 768
    tokens: int = 2048
    layers: int = 6
    precision: str = "bf16"
    repeats: int = 15


def main(arguments: Arguments) -> None:
    """Print the times and ratios. Raises ConfigError for invalid arguments."""
    if arguments.precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={arguments.precision} is not one of fp32, bf16")
    if arguments.tokens % 256 or arguments.tokens < 256:
        raise ConfigError(f"tokens={arguments.tokens} is not a multiple of 256, the length of a sequence")
    if not 1 <= arguments.top_k <= arguments.experts:
        raise ConfigError(f"top_k={arguments.top_k} must be from 1 to experts={arguments.experts}")
    keep_freed_memory()  # as training does, before any tensor is created
    calls = contenders(arguments)
    found = in_turn({name: lambda call=call: seconds(call) for name, call in calls.items()}, arguments.repeats)
    times = {name: median(each) for name, each in found.items()}
    for name, each in times.items():
        print(f"{name:18s} {1e3 * each:9.2f} ms")
    print(f"grouped / loop, time          {times['grouped'] / times['loop']:.2f}")
    print(f"grouped / one product, speed  {times['one product'] / times['grouped']:.2f}")
    print(f"dispatch, fraction of a step  {arguments.layers * times['dispatch'] / times['step']:.1%}")


def contenders(arguments: Arguments) -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by name."""
    import torch
    import torch.nn.functional as F

    from gptlite.models.gpt.config import GPTConfig, MoEConfig, Norm, Position
    from gptlite.models.gpt.model import GPT, prepare
    from gptlite.ops.config import OpsConfig
    from gptlite.ops.experts import Dispatch, grouped_linear
    from gptlite.ops.select import select_ops
    from gptlite.precision import Precision, PrecisionConfig, resolve_precision

    torch.manual_seed(0)
    a, cpu = arguments, torch.device("cpu")
    dtype = torch.bfloat16 if a.precision == "bf16" else torch.float32
    x = torch.randn(a.tokens, a.d_model, dtype=dtype)
    up, down = (
        torch.randn(a.experts, a.d_ff, a.d_model, dtype=dtype),
        torch.randn(a.experts, a.d_model, a.d_ff, dtype=dtype),
    )
    weights, chosen = torch.randn(a.tokens, a.experts).softmax(-1).topk(a.top_k)
    dispatch = Dispatch.of(chosen, a.experts)
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
        each = Dispatch.of(chosen, a.experts)
        return each.combined(each.rows(x), weights)

    moe = MoEConfig(experts=a.experts, top_k=a.top_k, d_ff=a.d_ff)
    sizes = {"num_layers": a.layers, "num_heads": 6, "d_model": a.d_model, "vocab_size": 8192, "sequence_length": 256}
    kind = {"position": Position.rope, "norm": Norm.rms_norm, "bias": False}
    model = GPT(GPTConfig(moe=moe, **sizes, **kind), select_ops(OpsConfig(), cpu))
    policy = resolve_precision(PrecisionConfig(dtype=Precision(a.precision)), cpu)
    prepare(model, policy, recomputes=False)
    tokens = torch.randint(8192, (a.tokens // 256, 256))

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
