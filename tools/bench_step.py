"""Time a training step on this machine: forward, backward, clipping, AdamW; median of interleaved runs.

python tools/bench_step.py [sizes=char,lite,gpt2v] [precision=bf16] [compile=false] [repeats=15] [peer=PATH_TO_NANOGPT]

With peer, a clone of nanoGPT, its model takes the same steps in turn with ours, under torch.autocast for bf16, as its
train.py does. Its CPU mode compiles nothing and computes in fp32: precision=fp32 compile=false.
"""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from gptlite.errors import ConfigError
from gptlite.tool import run_tool


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


@dataclass
class Arguments:
    """The command line."""

    sizes: str = "char,lite,gpt2v"
    precision: str = "bf16"
    compile: bool = False
    repeats: int = 15
    peer: str | None = None
    keep_freed_memory: bool = True


def main(arguments: Arguments) -> None:
    """Prints a line for each size and implementation, and the ratio of ours to the peer's."""
    unknown = set(arguments.sizes.split(",")) - set(SIZES)
    if unknown:
        raise ConfigError(f"sizes={arguments.sizes}: {', '.join(unknown)} unknown; the sizes are {', '.join(SIZES)}")
    if arguments.precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={arguments.precision} is not fp32 or bf16")
    from gptlite.launch import keep_freed_memory

    if arguments.keep_freed_memory:
        keep_freed_memory()
    for name in arguments.sizes.split(","):
        steps = {"gptlite": our_step(SIZES[name], arguments)}
        if arguments.peer:
            steps["nanoGPT"] = peer_step(SIZES[name], arguments, Path(arguments.peer))
        report(name, SIZES[name], measure(steps, arguments.repeats))


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turn, so that a drift of the machine's speed meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 3:  # the first ones compile, allocate and warm the caches
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def report(name: str, size: Size, seconds: dict[str, float]) -> None:
    """A line each."""
    tokens = size.batch_size * size.sequence_length
    for who, value in seconds.items():
        print(f"{name:9s} {who:8s} {value * 1e3:8.1f} ms {tokens / value:9.0f} tok/s", flush=True)
    if "nanoGPT" in seconds:
        print(f"{name:9s} ratio    {seconds['gptlite'] / seconds['nanoGPT']:8.2f} of nanoGPT's time", flush=True)


def our_step(size: Size, arguments: Arguments) -> Callable[[], None]:
    """A step of this project's, without its data loader and log."""
    import torch

    from gptlite.model.config import GPTConfig
    from gptlite.model.gpt import GPT
    from gptlite.model.init import init_weights
    from gptlite.model.parallelize import parallelize
    from gptlite.ops.config import OpsConfig
    from gptlite.ops.select import select_ops
    from gptlite.optimizer.build import build_optimizer
    from gptlite.optimizer.clip import clip_grad_norm
    from gptlite.optimizer.config import AdamWConfig
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.precision import Precision, PrecisionConfig, resolve_precision

    mesh = build_mesh(ParallelismConfig())
    policy = resolve_precision(PrecisionConfig(Precision[arguments.precision]), mesh.device)
    shape = {key: getattr(size, key) for key in ("vocab_size", "d_model", "num_heads", "num_layers", "sequence_length")}
    config = GPTConfig(**shape, bias=False)
    with mesh.device:
        model = GPT(config, select_ops(OpsConfig(), mesh.device))
    (part,) = parallelize(model, mesh, ParallelismConfig(), policy, compile=arguments.compile)
    init_weights(part, config, seed=0)
    optimizer = build_optimizer(AdamWConfig(lr=1e-3), part.named_parameters())
    tokens, targets = batch(size, mesh.device)

    def step() -> None:
        loss = part(tokens, targets) / targets.numel()
        loss.backward()
        clip_grad_norm(part.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def peer_step(size: Size, arguments: Arguments, folder: Path) -> Callable[[], None]:
    """A step of nanoGPT's model as its train.py takes it. Raises ConfigError if it is not in `folder`."""
    if not (folder / "model.py").exists():
        raise ConfigError(f"peer={folder} holds no model.py; give a clone of nanoGPT")
    import torch

    sys.path.insert(0, str(folder))
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
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    forward = torch.compile(model) if arguments.compile else model
    tokens, targets = batch(size, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16"):
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
