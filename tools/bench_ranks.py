"""Benchmark of a training step on two ranks: steps of gptlite and of DeepSpeed or picotron, run alternately.

torchrun --nproc-per-node=2 tools/bench_ranks.py peer=deepspeed folder=NANOGPT [layouts=zero1,zero3] [precision=bf16]
torchrun --nproc-per-node=2 tools/bench_ranks.py peer=picotron folder=PICOTRON [layouts=tp2,pp2] precision=fp32
    [sizes=lite] [repeats=15]

`folder` is a clone of nanoGPT, whose model DeepSpeed trains, or of picotron. A step is the forward pass, backward pass,
clipping and AdamW update of one global batch, with one thread per rank. It is timed from a barrier until all ranks are
done. If other programs use the machine, the ratio of processor times, summed over ranks, is more reliable.
bench_peers.py lists the differences between the programs.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bench_step import SIZES
from nanogpt import Size
from timing import check_names, in_turn

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError

if TYPE_CHECKING:
    from gptlite.models.gpt.config import GPTConfig

# Repository to clone for each peer, and a file that a clone must contain.
NEEDS = {"deepspeed": ("nanoGPT", "model.py"), "picotron": ("picotron", "picotron/model.py")}
DEFAULT = {"deepspeed": "zero1,zero3", "picotron": "tp2,pp2"}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepspeed": {f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)},
    "picotron": {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}},
}
RANKS = 2
MICRO_BATCHES = 4  # in layouts with a pipeline; in others, a rank's batch is one micro-batch


class Time(NamedTuple):
    """Seconds of a step: wall time from a barrier until the slowest rank is done, and total processor time of all
    ranks."""

    wall: float
    processor: float


@dataclass
class Arguments:
    """Command-line arguments."""

    peer: str = "???"
    folder: str = "???"
    layouts: str | None = None
    sizes: str = "lite"
    precision: str = "bf16"
    repeats: int = 15


def main(arguments: Arguments) -> None:
    """Print a line for each layout and program, and the ratio of our time to the peer's."""
    layouts = _check(arguments)
    from gptlite.launch.process import keep_freed_memory

    keep_freed_memory()  # before imports that create tensors: torch reads the setting only once
    import torch
    import torch.distributed as dist
    from bench_peers import deepspeed_step, llama_flops, picotron_step
    from real_step import config_of

    from gptlite.models.gpt.config import MLPKind
    from gptlite.models.gpt.flops import flops_per_token
    from gptlite.parallelism.process_group import join, leave_group

    warnings.simplefilter("ignore", FutureWarning)  # torch warns about renamed collectives in each call
    torch.set_num_threads(1)
    join(timeout_seconds=300)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    precision = arguments.precision
    say(f"torch {torch.__version__}, {RANKS} ranks of 1 thread, {precision}, freed memory kept on both sides")
    deepspeed, clone = arguments.peer == "deepspeed", Path(arguments.folder)
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        config = config_of(size, tied_embeddings=deepspeed, mlp=MLPKind.gelu_erf)  # as in nanoGPT
        flops = flops_per_token(config, size.sequence_length)
        for layout in layouts:
            ours = our_step(config, size.batch_size, LAYOUTS[arguments.peer][layout], precision)
            if deepspeed:
                peer, peer_flops = deepspeed_step(layout, size, precision, clone), flops
            else:
                peer, peer_flops = picotron_step(layout, size, MICRO_BATCHES, clone), llama_flops(size)
            times = in_turn({"gptlite": timed(ours), arguments.peer: timed(peer)}, arguments.repeats)
            for line in report(f"{name} {layout}", size, times, peer_flops / flops):
                say(line, flush=True)
    leave_group()


def timed(step: Callable[[], Any]) -> Callable[[], Time]:
    """Wrap a step in a function that runs it and returns its time. All ranks must call that function together."""
    import torch
    import torch.distributed as dist

    def take() -> Time:
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        step()
        busy = torch.tensor([time.process_time() - processor], dtype=torch.float64)
        dist.all_reduce(busy)  # also waits for the slowest rank
        return Time(time.perf_counter() - start, busy.item())

    return take


def report(title: str, size: Size, times: dict[str, list[Time]], peer_flops: float) -> list[str]:
    """Return a line per program, and a line with the ratios of our times to the peer's.

    The ratios are medians over pairs of consecutive steps, since a drift of the machine's speed affects both steps of a
    pair. `peer_flops` is the peer's FLOPs per token as a multiple of ours.
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


def our_step(config: "GPTConfig", batch: int, layout: dict[str, Any], precision: str) -> Callable[[], Any]:
    """Return a step of the trainer that uses the same batch in every call."""
    from real_step import build_step, run_config

    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import build_mesh

    parallelism = ParallelismConfig(**layout)
    mesh, count = build_mesh(parallelism), MICRO_BATCHES if parallelism.pipeline > 1 else 1
    size = batch // (count * mesh.data_size)
    return build_step(run_config(config, precision, parallelism), mesh, size, count)


def _check(arguments: Arguments) -> list[str]:
    """Return the layouts to run. Raises ConfigError for invalid arguments."""
    peer = arguments.peer
    if peer not in NEEDS:
        raise ConfigError(f"peer={peer} is not one of {', '.join(NEEDS)}")
    clone, file = NEEDS[peer]
    if not (Path(arguments.folder) / file).exists():
        raise ConfigError(f"folder={arguments.folder} has no {file}; give a clone of {clone}")
    layouts = (arguments.layouts or DEFAULT[peer]).split(",")
    if wrong := [layout for layout in layouts if layout not in LAYOUTS[peer]]:
        raise ConfigError(f"layouts={','.join(wrong)}: with peer={peer}, choose from {', '.join(LAYOUTS[peer])}")
    check_names("sizes", arguments.sizes, SIZES)
    if arguments.precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={arguments.precision} is not fp32 or bf16")
    if peer == "picotron" and arguments.precision != "fp32":
        raise ConfigError("precision=bf16: picotron's CPU mode computes in fp32; set precision=fp32")
    if os.environ.get("WORLD_SIZE") != str(RANKS):
        raise ConfigError(f"start {RANKS} ranks with torchrun --nproc-per-node={RANKS} {sys.argv[0]} ...")
    return layouts


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
