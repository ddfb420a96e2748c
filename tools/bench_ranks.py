"""Time a training step over two ranks beside a peer's, in turn in the same processes: DeepSpeed, picotron.

torchrun --nproc-per-node=2 tools/bench_ranks.py peer=deepspeed folder=NANOGPT [layouts=zero1,zero3] [precision=bf16]
torchrun --nproc-per-node=2 tools/bench_ranks.py peer=picotron folder=PICOTRON [layouts=tp2,pp2] precision=fp32
    [sizes=lite] [repeats=15] [micro_batches=4] [peer_fused=true] [keep_freed_memory=true]

`folder` is a clone of nanoGPT, whose model DeepSpeed trains, or of picotron. A step is forward, backward, clipping and
AdamW of one global batch, one thread a rank, from a barrier until all ranks are done. The ratio of processor time, of
all ranks together, is steadier where others use the machine. bench_peers.py says what differs between the two sides.
"""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench_step import SIZES, Size, batch

from gptlite.errors import ConfigError
from gptlite.tool import run_tool

if TYPE_CHECKING:
    from gptlite.models.gpt.config import GPTConfig
    from gptlite.parallelism.config import ParallelismConfig

PEERS = {"deepspeed": ("zero1", "zero3"), "picotron": ("tp2", "pp2")}
NEEDS = {"deepspeed": "model.py", "picotron": "picotron/model.py"}  # files that its folder has
RANKS = 2
WARM_UP = 3


@dataclass(frozen=True)
class Time:
    """Seconds of a step: from a barrier until the slowest rank is done, and of processors, of all ranks together."""

    wall: float
    processor: float


@dataclass
class Arguments:
    """The command line."""

    peer: str = "???"
    folder: str = "???"
    layouts: str | None = None
    sizes: str = "lite"
    precision: str = "bf16"
    repeats: int = 15
    micro_batches: int = 4  # of a pipeline; without one, a rank's batch is one micro-batch
    peer_fused: bool = True  # torch's fused AdamW on both sides; false: as the peer's own script has it
    keep_freed_memory: bool = True
    bucket_layers: int = 1
    prefetch: int = 1


def main(arguments: Arguments) -> None:
    """Prints a line for each layout and side, and the ratio of ours to the peer's."""
    layouts = _check(arguments)
    from gptlite.launch import keep_freed_memory

    if arguments.keep_freed_memory:
        keep_freed_memory()  # before torch makes a tensor, which some imports do: it asks only once for huge pages
    import torch
    import torch.distributed as dist
    from bench_peers import deepspeed_step, llama_flops, picotron_step

    from gptlite.models.gpt.flops import flops_per_token
    from gptlite.parallelism.process_group import join, leave

    warnings.simplefilter("ignore", FutureWarning)  # of collectives' new names, once a call
    torch.set_num_threads(1)
    join(timeout_seconds=300)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"torch {torch.__version__}, {RANKS} ranks of 1 thread, {arguments.precision}, "
        f"{'freed memory kept' if arguments.keep_freed_memory else 'stock malloc'} on both sides")  # fmt: skip
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        for layout in layouts:
            config = _model_config(size, tied=arguments.peer == "deepspeed")
            ours, flops = our_step(layout, size, arguments), flops_per_token(config, size.sequence_length)
            if arguments.peer == "deepspeed":
                peer = deepspeed_step(layout, size, arguments.precision, arguments.peer_fused, Path(arguments.folder))
                peer_flops = flops
            else:
                peer = picotron_step(
                    layout, size, arguments.micro_batches, arguments.peer_fused, Path(arguments.folder)
                )
                peer_flops = llama_flops(size)
            times = measure({"gptlite": ours, arguments.peer: peer}, arguments.repeats)
            for line in report(f"{name} {layout}", size, times, peer_flops / flops):
                say(line, flush=True)
    leave()


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[Time]]:
    """Times of each step, in turn."""
    import torch
    import torch.distributed as dist

    times: dict[str, list[Time]] = {name: [] for name in steps}
    for repeat in range(repeats + WARM_UP):
        for name, step in steps.items():
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            step()
            busy = torch.tensor([time.process_time() - processor], dtype=torch.float64)
            dist.all_reduce(busy)  # which waits for the slowest rank
            if repeat >= WARM_UP:
                times[name].append(Time(time.perf_counter() - start, busy.item()))
    return times


def report(title: str, size: Size, times: dict[str, list[Time]], peer_flops: float) -> list[str]:
    """A line each, and the ratios: medians of the pairs', as a drift of the machine's speed meets both of a pair.

    `peer_flops` is the peer's arithmetic per token as a multiple of ours.
    """
    tokens = size.batch_size * size.sequence_length
    lines = []
    for who, values in times.items():
        middle, fastest = median(value.wall for value in values), min(value.wall for value in values)
        busy = median(value.processor for value in values)
        lines.append(
            f"{title:10s} {who:9s} {middle * 1e3:8.1f} ms {tokens / middle:9.0f} tok/s, "
            f"fastest {fastest * 1e3:.1f} ms, processors {busy * 1e3:.1f} ms"
        )
    pairs = list(zip(*times.values(), strict=True))
    ratio = median(ours.wall / theirs.wall for ours, theirs in pairs)
    busy = median(ours.processor / theirs.processor for ours, theirs in pairs)
    lines.append(
        f"{title:10s} ratio     {ratio:8.3f} of the peer's time ({busy:.3f} of its processor time); "
        f"per FLOP {ratio * peer_flops:.3f}, as it computes {peer_flops:.3f} times our FLOPs"
    )
    return lines


def our_step(layout: str, size: Size, arguments: Arguments) -> Callable[[], None]:
    """A step of this project's as `pretrain` builds and takes it, with the same batch every time."""

    from gptlite.models.init import init_weights
    from gptlite.models.model import Model
    from gptlite.models.parallelize import build_passes, materialize
    from gptlite.ops.config import OpsConfig
    from gptlite.ops.select import select_ops
    from gptlite.optimizer.config import AdamWConfig, ConstantConfig
    from gptlite.optimizer.schedule import Schedule
    from gptlite.parallelism.chain import Chain
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.precision import Precision, PrecisionConfig, resolve_precision
    from gptlite.trainer.build import build_parts, build_updates
    from gptlite.trainer.signals import Stopping, StopSignal
    from gptlite.trainer.state import TrainState
    from gptlite.trainer.step import Step

    parallelism = _parallelism(layout, arguments)
    mesh = build_mesh(parallelism)
    policy = resolve_precision(PrecisionConfig(Precision[arguments.precision]), mesh.device)
    config = _model_config(size, tied=arguments.peer == "deepspeed")
    ops = select_ops(OpsConfig(), mesh.device)
    model = Model.of(config, policy)
    parts = build_parts(model, parallelism, mesh, policy, ops)
    materialize(model, parts, mesh.device)
    for part in parts:
        init_weights(model, part, seed=0)
    optimizer = build_updates(AdamWConfig(lr=1e-3), model, parts, parallelism, mesh, policy, ops)
    count = arguments.micro_batches if parallelism.pipeline > 1 else 1
    loader: Any = _Loader(size, count, mesh.data_size, mesh.device)
    chain = Chain(parts, mesh, parallelism)
    state = TrainState(model, chain, optimizer, Schedule(ConstantConfig(warmup_steps=0), 10**6), loader, {})
    passes = build_passes(
        model,
        chain,
        parallelism,
        micro_batches=count,
        micro_batch_size=loader.micro_batch_size,
        sequence_length=size.sequence_length,
    )
    step = Step(mesh, passes, peak_lr=1e-3, clip_norm=1.0, stopping=Stopping(mesh, StopSignal()))
    return lambda: void(step(state))


def void(_: object) -> None:
    """Nothing: a step's result is not needed."""


class _Loader:
    """What a step asks of a loader: random tokens, the same in every step."""

    def __init__(self, size: Size, count: int, data_size: int, device: Any) -> None:
        import torch

        from gptlite.data.batches import BatchSchedule
        from gptlite.data.loader import Batch

        self.schedule, self.num_micro_batches = BatchSchedule(size.batch_size), count
        self.micro_batch_size = size.batch_size // (count * data_size)
        tokens, targets = (each[: self.micro_batch_size] for each in batch(size, device))
        self._batch = Batch(tokens, targets, torch.arange(self.micro_batch_size, device=device))

    def micro_batches(self, consumed_samples: int) -> int:
        return self.num_micro_batches

    def batch(self, consumed_samples: int, micro_index: int) -> Any:
        return self._batch


def _model_config(size: Size, tied: bool) -> "GPTConfig":
    from gptlite.models.gpt.config import Activation, GPTConfig

    shape = {key: getattr(size, key) for key in ("vocab_size", "d_model", "num_heads", "num_layers", "sequence_length")}
    return GPTConfig(**shape, bias=False, tied_embeddings=tied, activation=Activation.gelu_erf)  # as nanoGPT's


def _parallelism(layout: str, arguments: Arguments) -> "ParallelismConfig":
    from gptlite.parallelism.config import ParallelismConfig

    degrees: dict[str, dict[str, Any]] = {
        "zero1": {"zero": 1},
        "zero2": {"zero": 2},
        "zero3": {"zero": 3},
        "tp2": {"tensor": 2},
        "pp2": {"pipeline": 2},
    }
    return ParallelismConfig(**degrees[layout], bucket_layers=arguments.bucket_layers, prefetch=arguments.prefetch)


def _check(arguments: Arguments) -> list[str]:
    """The layouts. Raises ConfigError for what cannot run."""
    import os

    if arguments.peer not in PEERS:
        raise ConfigError(f"peer={arguments.peer} is none of {', '.join(PEERS)}")
    if not (Path(arguments.folder) / NEEDS[arguments.peer]).exists():
        clone = "nanoGPT" if arguments.peer == "deepspeed" else "picotron"
        raise ConfigError(f"folder={arguments.folder} holds no {NEEDS[arguments.peer]}; give a clone of {clone}")
    legal = {"deepspeed": ("zero1", "zero2", "zero3"), "picotron": ("tp2", "pp2")}[arguments.peer]
    layouts = (arguments.layouts or ",".join(PEERS[arguments.peer])).split(",")
    if wrong := [layout for layout in layouts if layout not in legal]:
        raise ConfigError(f"layouts={','.join(wrong)}: with peer={arguments.peer} they are {', '.join(legal)}")
    if unknown := set(arguments.sizes.split(",")) - set(SIZES):
        raise ConfigError(f"sizes={arguments.sizes}: {', '.join(unknown)} unknown; the sizes are {', '.join(SIZES)}")
    if arguments.precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={arguments.precision} is not fp32 or bf16")
    if arguments.peer == "picotron" and arguments.precision != "fp32":
        raise ConfigError("precision=bf16: picotron's CPU mode computes in fp32; set precision=fp32")
    for size in arguments.sizes.split(","):
        if SIZES[size].batch_size % arguments.micro_batches:
            raise ConfigError(
                f"micro_batches={arguments.micro_batches} do not divide {size}'s batch of {SIZES[size].batch_size}"
            )
    if os.environ.get("WORLD_SIZE") != str(RANKS):
        raise ConfigError(f"start {RANKS} ranks: torchrun --nproc-per-node={RANKS} {sys.argv[0]} ...")
    return layouts


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
