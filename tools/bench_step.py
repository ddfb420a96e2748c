"""Benchmark of a training step: forward pass, backward pass, clipping and AdamW update.

python tools/bench_step.py [sizes=char,lite,gpt2v] [precision=bf16] [compile=false] [ops=auto] [repeats=15]
    [peer=PATH_TO_NANOGPT] [peer_modes=fp32,bf16] [others=relu2,swiglu,muon,muon_relu2,default,muon_floor]

Each contender runs in a separate process, set up as in its train.py. Steps are interleaved, and results are medians.
The floor runs only the GEMMs of a step, including the batched ones of attention, with the same shapes and preallocated
outputs, and one pass of torch's fused AdamW over the parameters. `others` selects more contenders:

relu2, swiglu     GPTs with RoPE, RMS norm and QK norm, and as many GEMM FLOPs as the plain GPT; the MLP has a squared
                  ReLU, or is gated and 8/3 times as wide as the model
muon, muon_relu2  the plain GPT, or the GPT of relu2, with Muon
default           model and optimizer of the default run; use with sizes=gpt-lite
muon_floor        the floor plus the GEMMs of Muon

`peer` is a clone of nanoGPT. Its model is timed in fp32, which is nanoGPT's CPU mode, and under torch.autocast (bf16,
or bf16_compile with torch.compile).
"""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from nanogpt import Size, check_clone, nanogpt_step
from timing import check_names, in_turn, seconds

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError

ASLEEP = 0.05  # seconds to wait, as idle threads of the previous contender may still spin on the cores
STEP_SECONDS = 600  # timeout of a step; the first step, which compiles, is the slowest

SIZES = {
    "char": Size(65, 128, 4, 4, 64, 12),
    "lite": Size(8192, 384, 6, 6, 256, 8),
    "gpt2v": Size(50304, 256, 4, 4, 256, 8),
    "gpt-lite": Size(4096, 256, 8, 4, 256, 16),
}
CHOICES = {
    "sizes": SIZES,
    "peer_modes": ("fp32", "bf16", "bf16_compile"),
    "others": ("", "relu2", "swiglu", "muon", "muon_relu2", "default", "muon_floor"),
    "precision": ("fp32", "bf16"),
    "ops": ("auto", "fused", "reference"),
}


@dataclass
class Arguments:
    """Command-line arguments."""

    sizes: str = "char,lite,gpt2v"
    precision: str = "bf16"
    compile: bool = False
    ops: str = "auto"
    repeats: int = 15
    peer: str | None = None
    peer_modes: str = "fp32,bf16"
    others: str = ""
    keep_freed_memory: bool = True


def main(arguments: Arguments) -> None:
    """Print a line for each size and contender. Raises ConfigError for invalid arguments."""
    for key, known in CHOICES.items():
        check_names(key, getattr(arguments, key), known, several=key not in ("precision", "ops"))
    if arguments.repeats < 1:
        raise ConfigError(f"repeats={arguments.repeats} must be at least 1")
    if arguments.peer:
        check_clone(arguments.peer)
    for name in arguments.sizes.split(","):
        with ExitStack() as running:
            size = SIZES[name]
            steps = {"gptlite": running.enter_context(elsewhere(our_step, size, arguments))}
            steps["floor"] = running.enter_context(elsewhere(floor_step, size, arguments))
            for other in filter(None, arguments.others.split(",")):
                build = floor_step if other == "muon_floor" else our_step
                steps[other] = running.enter_context(elsewhere(build, size, arguments, other))
            for mode in arguments.peer_modes.split(",") if arguments.peer else ():
                step = running.enter_context(elsewhere(nanogpt_step, arguments.peer, size, mode))
                steps[f"nanoGPT {mode}"] = step
            times = in_turn(steps, arguments.repeats)
        report(name, size, {who: median(each) for who, each in times.items()})


@contextmanager
def elsewhere(build: Callable[..., Callable[[], None]], *arguments: Any) -> Any:
    """Yield a function that runs a step in another process and returns its seconds. That process builds the step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, build, arguments), daemon=True)
    process.start()
    theirs.close()

    def step() -> float:
        ours.send(True)
        if not ours.poll(STEP_SECONDS):
            raise TimeoutError(f"a step took more than {STEP_SECONDS} s")
        answer = ours.recv()
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer

    try:
        yield step
    finally:
        ours.close()
        process.join(10)
        process.kill()


def serve(pipe: Any, build: Callable[..., Callable[[], None]], arguments: tuple[Any, ...]) -> None:
    """Build a step, then time it for each message until the pipe is closed. Runs in the other process."""
    try:
        pipe.recv()
        step = build(*arguments)
        import torch  # after `build`, which may have to set up the process first

        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        while True:
            time.sleep(ASLEEP)
            step()  # warms up the caches, as the previous step does in training
            wait()
            pipe.send(seconds(lambda: (step(), wait())))
            pipe.recv()
    except EOFError:
        pass
    except ConfigError as error:
        pipe.send(str(error))


def report(name: str, size: Size, times: dict[str, float]) -> None:
    """Print a line per contender with its time relative to ours, or for the floor, our time relative to the floor."""
    tokens, ours = size.batch_size * size.sequence_length, times["gptlite"]
    for who, value in times.items():
        comparison = f"gptlite is {value / ours:.2f}x as fast"
        if who == "floor":
            comparison = f"gptlite takes {ours / value:.2f}x the floor"
        elif who == "gptlite":
            comparison = ""
        elif "nanoGPT" not in who:
            comparison = f"takes {value / ours:.3f}x gptlite"
        print(f"{name:9s} {who:20s} {value * 1e3:8.1f} ms {tokens / value:9.0f} tok/s  {comparison}", flush=True)


def our_step(size: Size, arguments: Arguments, other: str = "") -> Callable[[], Any]:
    """Return a step of the trainer, without data loader and log. `other`: one of `others`, or "" for the plain GPT."""
    from gptlite.launch.process import keep_freed_memory

    if arguments.keep_freed_memory:
        keep_freed_memory()  # before imports that create tensors: torch reads the setting only once
    from real_step import build_step, config_of, run_config

    from gptlite.config import load
    from gptlite.models.gpt.config import MLPKind, Norm, Position
    from gptlite.ops.config import Implementation, OpsConfig
    from gptlite.ops.select import select_ops
    from gptlite.optimizer.config import AdamWConfig, MuonConfig
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import build_mesh

    mesh = build_mesh(ParallelismConfig())
    ops = select_ops(OpsConfig(Implementation[arguments.ops]), mesh.device)
    modern = {"position": Position.rope, "norm": Norm.rms_norm, "qk_norm": True}
    if other == "default":
        default = load()
        config, rule = replace(default.model, vocab_size=size.vocab_size), default.optimizer
    else:
        mlp, rule = other.removeprefix("muon").removeprefix("_"), MuonConfig() if "muon" in other else AdamWConfig()
        config = config_of(size, **modern, mlp=MLPKind[mlp]) if mlp else config_of(size)
    run = run_config(config, arguments.precision, rule=rule, compile=arguments.compile)
    return build_step(run, mesh, size.batch_size, ops=ops)


def floor_step(size: Size, arguments: Arguments, other: str = "") -> Callable[[], None]:
    """Return a step of only the GEMMs and one AdamW pass. With `other`, the GEMMs of Muon are added."""
    import torch

    from gptlite.optimizer.config import MuonConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    random = partial(torch.randn, dtype=dtype, device=device)
    tokens, width, length = size.batch_size * size.sequence_length, size.d_model, size.sequence_length
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    linear = [*layer * size.num_layers, (width, size.vocab_size)]
    products = [each for inputs, outputs in linear for each in linear_products(random, tokens, inputs, outputs)]
    heads = (size.batch_size * size.num_heads, length, width // size.num_heads)
    for _ in range(size.num_layers):
        products += attention_products(random, *heads)
    if other:
        steps, layers = MuonConfig().newton_schulz_steps, size.num_layers
        for count, wide in ((4 * layers, width), (2 * layers, 4 * width)):  # q, k, v and attention output; MLP
            products += square_products(random, count, width, wide) * steps
    count = size.vocab_size * width + length * width + sum(a * b for a, b in layer) * size.num_layers
    parameters = torch.zeros(count, device=device)
    parameters.grad = torch.zeros_like(parameters)
    optimizer = torch.optim.AdamW([parameters], fused=True)
    calls = [partial(torch.mm if a.ndim == 2 else torch.bmm, a, b, out=out) for a, b, out in products]

    def step() -> None:
        for call in calls:
            call()
        optimizer.step()

    return step


# The operands and the preallocated result of GEMMs, for floor_step. `random` creates a tensor of a shape.
Products = list[tuple[Any, Any, Any]]


def linear_products(random: Callable[..., Any], rows: int, inputs: int, outputs: int) -> Products:
    """Return x wᵀ, dy w and dyᵀ x of a linear layer, on separate operands per layer, as in a step."""
    x, dx = random(rows, inputs), random(rows, inputs)
    w, dw = random(outputs, inputs), random(outputs, inputs)
    y = random(rows, outputs)
    return [(x, w.t(), y), (y, w, dx), (y.t(), x, dw)]


def square_products(random: Callable[..., Any], matrices: int, rows: int, columns: int) -> Products:
    """Return x xᵀ, (x xᵀ)² and (x xᵀ)² x, as in a Newton-Schulz step, on batches of matrices."""
    x, out = random(matrices, rows, columns), random(matrices, rows, columns)
    square, fourth = random(matrices, rows, rows), random(matrices, rows, rows)
    return [(x, x.mT, square), (square, square, fourth), (fourth, x, out)]


def attention_products(random: Callable[..., Any], matrices: int, length: int, width: int) -> Products:
    """Return the batched q kᵀ and p v of attention, and in the backward pass dy vᵀ, pᵀ dy, ds k and dsᵀ q."""
    q, k, v, out = (random(matrices, length, width) for _ in range(4))
    p = random(matrices, length, length)
    scores, values, back = q @ k.mT, out.clone(), out.clone()
    backward = [(out, v.mT, scores), (p.mT, out, back), (p, k, back), (p.mT, q, back)]
    return [(q, k.mT, scores), (p, v, values), *backward]


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
