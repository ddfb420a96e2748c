"""Time a training step on this machine: forward, backward, clipping, AdamW; medians of interleaved runs.

python tools/bench_step.py [sizes=char,lite,gpt2v] [precision=bf16] [compile=false] [ops=auto] [repeats=15]
    [peer=PATH_TO_NANOGPT] [peer_modes=fp32,bf16]

Each contender runs in a process of its own, as its own train.py would set it up, and they take their steps in turn. The
floor is every matrix product of a step, attention's batched ones included, at its own shape into buffers that are
there, and one pass of torch's fused AdamW over the parameters. With peer, a clone of nanoGPT, its model steps too: in
fp32, which is its CPU mode, and under torch.autocast (bf16; bf16_compile: compiled as well).
"""

import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from gptlite.errors import ConfigError
from gptlite.tool import run_tool

WARM = 3  # the first steps compile, allocate and fill the caches
ASLEEP = 0.05  # seconds after which the threads of the one before no longer spin, waiting for work, on the cores
STEP_SECONDS = 600  # more than the slowest first step takes, compiling


@dataclass(frozen=True)
class Size:
    """The work of a step."""

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    sequence_length: int
    batch_size: int


SIZES = {
    "char": Size(65, 128, 4, 4, 64, 12),
    "lite": Size(8192, 384, 6, 6, 256, 8),
    "gpt2v": Size(50304, 256, 4, 4, 256, 8),
    "gpt-lite": Size(4096, 256, 8, 4, 256, 16),
}
PEER_MODES = ("fp32", "bf16", "bf16_compile")


@dataclass
class Arguments:
    """The command line."""

    sizes: str = "char,lite,gpt2v"
    precision: str = "bf16"
    compile: bool = False
    ops: str = "auto"
    repeats: int = 15
    peer: str | None = None
    peer_modes: str = "fp32,bf16"
    keep_freed_memory: bool = True


def main(arguments: Arguments) -> None:
    """Prints a line for each size and contender, and the ratios."""
    sizes, modes = arguments.sizes.split(","), arguments.peer_modes.split(",")
    for key, given, known in (("sizes", sizes, SIZES), ("peer_modes", modes, PEER_MODES)):
        if unknown := set(given) - set(known):
            raise ConfigError(f"{key}={','.join(given)}: {', '.join(unknown)} unknown; there are {', '.join(known)}")
    for key, value, known in (
        ("precision", arguments.precision, ("fp32", "bf16")),
        ("ops", arguments.ops, ("auto", "fused", "reference")),
    ):
        if value not in known:
            raise ConfigError(f"{key}={value} is not one of {', '.join(known)}")
    if arguments.repeats < 1:
        raise ConfigError(f"repeats={arguments.repeats} must be at least 1")
    if arguments.peer and not (Path(arguments.peer) / "model.py").exists():
        raise ConfigError(f"peer={arguments.peer} holds no model.py; give a clone of nanoGPT")
    for name in sizes:
        with ExitStack() as running:
            steps = {"gptlite": running.enter_context(elsewhere(our_step, SIZES[name], arguments))}
            steps["floor"] = running.enter_context(elsewhere(floor_step, SIZES[name], arguments))
            for mode in modes if arguments.peer else ():
                steps[f"nanoGPT {mode}"] = running.enter_context(elsewhere(peer_step, SIZES[name], arguments, mode))
            report(name, SIZES[name], measure(steps, arguments.repeats))


@contextmanager
def elsewhere(build: Callable[..., Callable[[], None]], *given: Any) -> Any:
    """A step, built and taken in a process of its own; a call returns the seconds it took."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, build, given), daemon=True)
    process.start()
    there.close()

    def step() -> float:
        here.send(True)
        if not here.poll(STEP_SECONDS):
            raise TimeoutError(f"no step in {STEP_SECONDS} s")
        answer = here.recv()
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer

    try:
        yield step
    finally:
        here.close()
        process.join(10)
        process.kill()


def serve(pipe: Any, build: Callable[..., Callable[[], None]], given: tuple[Any, ...]) -> None:
    """In the other process: takes a step whenever asked, until nobody asks any more."""
    try:
        pipe.recv()
        step = build(*given)
        while True:
            time.sleep(ASLEEP)
            step()  # as in training, where the step before was one's own
            start = time.perf_counter()
            step()
            pipe.send(time.perf_counter() - start)
            pipe.recv()
    except EOFError:
        pass
    except ConfigError as error:
        pipe.send(str(error))


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turn, so that a drift of the machine's speed meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + WARM):
        for name, step in steps.items():
            seconds = step()
            if repeat >= WARM:
                times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}


def report(name: str, size: Size, seconds: dict[str, float]) -> None:
    """A line each, with how many times as long as ours a contender takes; of the floor, ours over it."""
    tokens, ours = size.batch_size * size.sequence_length, seconds["gptlite"]
    for who, value in seconds.items():
        words = {"gptlite": "", "floor": f"gptlite takes {ours / value:.2f}x the floor"}.get(
            who, f"gptlite is {value / ours:.2f}x as fast"
        )
        print(f"{name:9s} {who:20s} {value * 1e3:8.1f} ms {tokens / value:9.0f} tok/s  {words}", flush=True)


def our_step(size: Size, arguments: Arguments) -> Callable[[], None]:
    """A step of this project's, without its data loader and log."""
    from gptlite.launch import keep_freed_memory

    if arguments.keep_freed_memory:
        keep_freed_memory()  # before torch makes a tensor, which some imports do: it asks only once for huge pages
    import torch

    from gptlite.models.gpt.config import GPTConfig
    from gptlite.models.gpt.model import GPT
    from gptlite.models.init import init_weights
    from gptlite.models.model import Model
    from gptlite.models.parallelize import parallelize
    from gptlite.ops.config import Implementation, OpsConfig
    from gptlite.ops.select import select_ops
    from gptlite.optimizer.build import build_optimizer
    from gptlite.optimizer.clip import local_grad_norm
    from gptlite.optimizer.config import AdamWConfig
    from gptlite.optimizer.fused import clip_and_step
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.parallelism.pipeline import known_upstream
    from gptlite.precision import Precision, PrecisionConfig, resolve_precision

    mesh = build_mesh(ParallelismConfig())
    policy = resolve_precision(PrecisionConfig(Precision[arguments.precision]), mesh.device)
    shape = {key: getattr(size, key) for key in ("vocab_size", "d_model", "num_heads", "num_layers", "sequence_length")}
    config = GPTConfig(**shape, bias=False)
    ops = select_ops(OpsConfig(Implementation[arguments.ops]), mesh.device)
    with mesh.device:
        model = GPT(config, ops)
    (part,) = parallelize(Model.of(config, policy), model, mesh, ParallelismConfig(), policy, compile=arguments.compile)
    init_weights(Model.of(config), part, seed=0)
    optimizer = build_optimizer(AdamWConfig(lr=1e-3), part.named_parameters(), ops.adamw)
    tokens, targets = batch(size, mesh.device)
    valid = torch.tensor(targets.numel(), device=mesh.device)
    upstream = known_upstream(valid)

    def step() -> None:
        loss = part(tokens, targets, upstream=upstream) / valid
        loss.backward()
        norm = local_grad_norm(part.parameters(), ops.adamw)
        clip_and_step(optimizer, part.parameters(), 1.0, norm)
        optimizer.zero_grad(set_to_none=True)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def floor_step(size: Size, arguments: Arguments) -> Callable[[], None]:
    """The products of a step and a pass over the optimizer's bytes, and nothing else."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    tokens, width, length = size.batch_size * size.sequence_length, size.d_model, size.sequence_length
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    linear = [*layer * size.num_layers, (width, size.vocab_size)]
    products = [each for inputs, outputs in linear for each in linear_products(tokens, inputs, outputs, dtype, device)]
    heads = (size.batch_size * size.num_heads, length, width // size.num_heads)
    for _ in range(size.num_layers):
        products += attention_products(*heads, dtype, device)
    count = size.vocab_size * width + length * width + sum(a * b for a, b in layer) * size.num_layers
    parameters = torch.zeros(count, device=device)
    parameters.grad = torch.zeros_like(parameters)
    optimizer = torch.optim.AdamW([parameters], fused=True)

    def step() -> None:
        for product in products:
            product()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def linear_products(rows: int, inputs: int, outputs: int, dtype: Any, device: Any) -> list[Callable[[], Any]]:
    """x wᵀ, dy w and dyᵀ x, each with operands of its own, as in a step."""
    import torch

    x, dx = (torch.randn(rows, inputs, dtype=dtype, device=device) for _ in range(2))
    w, dw = (torch.randn(outputs, inputs, dtype=dtype, device=device) for _ in range(2))
    y = torch.randn(rows, outputs, dtype=dtype, device=device)
    return [
        lambda: torch.mm(x, w.t(), out=y),
        lambda: torch.mm(y, w, out=dx),
        lambda: torch.mm(y.t(), x, out=dw),
    ]


def attention_products(matrices: int, length: int, width: int, dtype: Any, device: Any) -> list[Callable[[], Any]]:
    """q kᵀ and p v, and of the backward pass dy vᵀ, pᵀ dy, ds k and dsᵀ q."""
    import torch

    q, k, v, out = (torch.randn(matrices, length, width, dtype=dtype, device=device) for _ in range(4))
    p = torch.randn(matrices, length, length, dtype=dtype, device=device)
    scores, values, back = q @ k.mT, torch.empty_like(out), torch.empty_like(out)
    return [
        lambda: torch.bmm(q, k.mT, out=scores),
        lambda: torch.bmm(p, v, out=values),
        lambda: torch.bmm(out, v.mT, out=scores),
        lambda: torch.bmm(p.mT, out, out=back),
        lambda: torch.bmm(p, k, out=back),
        lambda: torch.bmm(p.mT, q, out=back),
    ]


def peer_step(size: Size, arguments: Arguments, mode: str = "bf16") -> Callable[[], None]:
    """A step of nanoGPT's model as its train.py takes it."""
    import torch

    assert arguments.peer is not None
    sys.path.insert(0, arguments.peer)
    import model as nanogpt  # pyright: ignore[reportMissingImports]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = nanogpt.GPTConfig(
        block_size=size.sequence_length,
        vocab_size=size.vocab_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.d_model,
        dropout=0.0,
        bias=False,
    )
    with redirect_stdout(StringIO()):
        model: Any = nanogpt.GPT(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = torch.compile(model) if mode == "bf16_compile" else model
    tokens, targets = batch(size, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=mode != "fp32"):
            loss = forward(tokens, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def batch(size: Size, device: Any) -> tuple[Any, Any]:
    """Random tokens and targets, int64[B, S]."""
    import torch

    shape = (size.batch_size, size.sequence_length)
    return tuple(torch.randint(size.vocab_size, shape, device=device) for _ in range(2))  # pyright: ignore[reportReturnType]


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
