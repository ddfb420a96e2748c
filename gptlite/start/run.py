"""Start of a run by a command: the planner resolves `parallelism=auto`, predicts the memory, and advises if it runs
out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gptlite.config.schema import Config
from gptlite.errors import without_exit
from gptlite.launch import launcher, process, worker
from gptlite.launch.host_memory import lift, out_of_memory
from gptlite.launch.starter import Starter, is_main, starter
from gptlite.progress import working

if TYPE_CHECKING:
    from gptlite.launch.elastic import Ended
    from gptlite.run.result import Result


def launch(config: Config, started: float) -> int:
    """Run the configuration and return the exit code. Raises ConfigError, before it writes anything, for a refusal.

    `started` is the start of the command in time.monotonic() seconds, from which `trainer.max_time` counts. Under
    torchrun or srun this process is one of their ranks; otherwise it starts as many ranks as the layout requires.
    """
    process.keep_freed_memory()  # before the planner creates tensors; ranks started here inherit the environment
    outer = starter()
    with working("starting", print if is_main() else lambda _: None):  # imports torch, and checks the memory
        config, world = settled(config, outer)
    if world == 1:
        from gptlite.trainer.signals import StopSignal

        try:
            return launcher.alone(config, started, StopSignal(), predicted(config, world)).exit_code
        except Exception as error:
            if not (reason := out_of_memory(error)):
                raise
            lift()  # the report needs memory
            return process.ran_out(reason, config, advice(config, world))
    if outer:
        return under(outer, config, started).exit_code
    return start_ranks(config, world, started).exit_code


@without_exit()  # the planner builds the model, whose code may be a plugin's
def settled(config: Config, outer: Starter | None, ranks: int | None = None) -> tuple[Config, int]:
    """Return the configuration with its layout resolved, and the number of ranks.

    By default the layout determines the number of ranks; `outer` or `ranks` overrides it. Raises ConfigError if the
    configuration cannot run here.
    """
    if config.parallelism.auto:
        from gptlite.plan.planning import chosen

        config = chosen(config, outer.world_size if outer else ranks, print if is_main() else lambda _: None)
    return config, launcher.check_here(config, outer, ranks)


def start_ranks(config: Config, world: int, started: float) -> Ended:
    """Run the configuration in new processes, even for one rank. Raises ConfigError if a rank refuses it."""
    return launcher.start_ranks(config, world, started, predicted(config, world), partial(advice, config, world))


def under(outer: Starter, config: Config, started: float) -> Result:
    """Run this process as a rank of torchrun or srun, and return the result of the run."""
    process.keep_freed_memory()
    from gptlite.pretrain import pretrain

    memory = "" if outer.rank else predicted(config, outer.world_size)  # rank 0 prints the banner
    train = partial(pretrain, memory=memory)
    return worker.under(outer, config, started, train, partial(advice, config, outer.world_size))


def predicted(config: Config, world: int) -> str:
    """Return the words of the banner on the predicted memory of the ranks."""
    with working("predicting the memory of a rank", print):
        from gptlite.plan.banner import memory_words

        return memory_words(config, world)


def advice(config: Config, world: int) -> list[str]:
    """Return lines on settings that need less memory."""
    from gptlite.plan.advice import advice_lines

    return advice_lines(config, world)
