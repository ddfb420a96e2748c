"""Check that a layout trains like a single process: run the same steps on both, and compare every tensor.

gptlite parity parallelism=tp2_pp2 parallelism.zero=3 [steps=5] [any KEY=VALUE of train]

The first steps of the configured run are taken by one process, then by the layout, whose ranks are started here: on
GPUs, or as gloo processes on a CPU. One row per step has the differences of losses, gradient norms, gradients and
updated parameters. The last line is the verdict; if tensors differ, it names the first one. No run folder is written.

By default, random tokens (data=synthetic) and fp32 are used. In bf16, fp16, amp_o1 and amp_o2 the layout may differ
from one process by up to twice that process's difference from fp32. With parallelism.deterministic=true it must not
differ. Exit codes: 0 the same, 1 different, 2 refused.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gptlite.commands.train import run_command
from gptlite.config.batch import check_world
from gptlite.config.compose import load
from gptlite.config.overrides import key_of
from gptlite.config.schema import Config, model_name
from gptlite.errors import ConfigError
from gptlite.launch.launcher import with_known_vocabulary
from gptlite.launch.starter import starter
from gptlite.parallelism.layout import wanted_world
from gptlite.precision import Precision, PrecisionConfig
from gptlite.progress import counted
from gptlite.satellites.deepspeed import with_deepspeed

if TYPE_CHECKING:
    from gptlite.satellites.parity.record import StepRecord

# Defaults for short runs. A large vocabulary would take most of the time.
CHEAP = ("data=synthetic", "data.vocab_size=500", "data.num_tokens=100000")


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(arguments: list[str]) -> int:
    """Run the comparison and return the exit code. Raises ConfigError for an invalid configuration or a single rank."""
    steps, config = composed(arguments)
    if outer := starter():
        raise ConfigError(f"parity starts the ranks itself; run it as a single process, without {outer.name}")
    import torch

    world = wanted_world(config.parallelism, gpus := torch.cuda.device_count())
    layout = check_world(with_known_vocabulary(config, guess=False), world)
    if world == 1:
        raise ConfigError("the layout has only one rank; give one with several, e.g. parallelism=tp2")
    if (codec := config.parallelism.compression.value) != "none":
        raise ConfigError(
            f"parallelism.compression={codec} rounds gradients, and parity is up to rounding in fp32; "
            "use parallelism.compression=none"
        )
    if gpus and world > gpus:
        raise ConfigError(
            f"the layout has {world} ranks, but this machine has {counted(gpus, 'GPU')}; "
            "set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    from gptlite.launch.elastic import run_ranks
    from gptlite.satellites.parity.worker import save_reference

    with tempfile.TemporaryDirectory(prefix="gptlite-parity-") as folder:
        print(f"one process: {steps} steps of {model_name(config.model)}", flush=True)
        reference, exact = one_process(config, steps)
        save_reference(Path(folder), reference, exact)
        if gpus:
            torch.cuda.empty_cache()
        print(f"{layout.describe(config.parallelism)}: {world} ranks", flush=True)
        return run_ranks(config, world, time.monotonic(), ("-m", "gptlite.satellites.parity.worker", folder))


def composed(arguments: list[str]) -> tuple[int, Config]:
    """Return the number of steps, and train's configuration for the other arguments, with synthetic data and
    fp32 by default."""
    own = {key: value for key, _, value in (each.partition("=") for each in arguments) if key == "steps"}
    if not (steps := own.get("steps", "5")).isdigit() or steps == "0":
        raise ConfigError(f"steps={steps} must be an integer of at least 1")
    arguments = with_deepspeed(arguments)
    given = {key_of(each): each for each in arguments if not each.startswith("steps=")}
    cheap = [] if {"data", "experiment"} & given.keys() else [each for each in CHEAP if key_of(each) not in given]
    cheap += [] if {"precision", "precision.dtype", "experiment"} & given.keys() else ["precision=fp32"]
    config = load([*cheap, *given.values()])
    # Restarted ranks would repeat steps that rank 0 has already compared.
    return int(steps), replace(config, trainer=replace(config.trainer, max_restarts=0))


def one_process(config: Config, steps: int) -> "tuple[Iterator[StepRecord], Iterator[StepRecord] | None]":
    """Return the records of the reference steps and, for 16-bit precision, those of the same run in fp32."""
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import build_mesh
    from gptlite.precision import resolve_precision
    from gptlite.satellites.parity.record import recorded

    layout = config.parallelism
    alone = replace(config, parallelism=ParallelismConfig(elastic=layout.elastic, deterministic=layout.deterministic))
    runs = [alone]
    if resolve_precision(config.precision, build_mesh(alone.parallelism).device).name != "fp32":
        runs.append(replace(alone, precision=PrecisionConfig(Precision.fp32)))
    first, *exact = ((step for step in recorded(run, steps) if step is not None) for run in runs)
    return first, exact[0] if exact else None
