"""Run of a command: the planner resolves `parallelism=auto`, predicts the memory, and advises if it runs out.

At the end, the run is plotted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.config.saved import to_yaml
from gptlite.config.schema import Config
from gptlite.errors import one_line, printable, without_exit
from gptlite.launch import launcher, process, worker
from gptlite.launch.host_memory import lift, out_of_memory
from gptlite.launch.starter import Starter, is_main, starter
from gptlite.progress import working
from gptlite.satellites.elastic.proxy import with_keeper
from gptlite.start.rank import KEEPER, START, WORKER

if TYPE_CHECKING:
    from gptlite.launch.elastic import Ended
    from gptlite.trainer.result import Result
    from gptlite.trainer.signals import StopSignal


def launch_command(config: Config, started: float) -> int:
    """Run the configuration and return the exit code. Raises ConfigError, before it writes anything, for a refusal.

    `started` is the start of the command in time.monotonic() seconds, from which `trainer.max_time` counts. Under
    torchrun or srun this process is one of their ranks; otherwise it starts as many ranks as the layout requires.
    """
    process.keep_freed_memory()  # before the planner creates tensors; ranks started here inherit the environment
    outer = starter()
    if outer and config.parallelism.elastic and outer.name == "torchrun":
        with_keeper(KEEPER, lambda: to_yaml(config))
    with working("starting", print if is_main() else lambda _: None):  # imports torch, and checks the memory
        config, world = settled(config, outer)
    if world == 1:
        from gptlite.trainer.signals import StopSignal

        try:
            return alone(config, started, StopSignal()).exit_code
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
        from gptlite.satellites.plan.planning import chosen

        config = chosen(config, outer.world_size if outer else ranks, print if is_main() else lambda _: None)
    return config, launcher.check_here(config, outer, ranks)


def alone(config: Config, started: float, stop: StopSignal | None) -> Result:
    """Run the configuration in this process, and return the result of the run."""
    from gptlite.start.pretrain import pretrain

    result = launcher.alone(config, started, stop, partial(pretrain, memory=predicted(config, 1)))
    drawn(Path(config.run.dir).expanduser(), result.exit_code)
    return result.with_curves()


def start_ranks(config: Config, world: int, started: float) -> Ended:
    """Run the configuration in new processes, even for one rank. Raises ConfigError if a rank refuses it."""
    memory, advise = predicted(config, world), partial(advice, config, world)
    start = WORKER if config.parallelism.elastic else START
    ended = launcher.start_ranks(config, world, started, ("-c", start), memory, advise)
    if not ended.killed:
        drawn(Path(config.run.dir).expanduser(), ended.exit_code)
    return ended


def under(outer: Starter, config: Config, started: float) -> Result:
    """Run this process as a rank of torchrun or srun, and return the result of the run."""
    process.keep_freed_memory()
    from gptlite.start.pretrain import pretrain

    memory = "" if outer.rank else predicted(config, outer.world_size)  # rank 0 prints the banner
    train = partial(pretrain, memory=memory)
    result = worker.under(outer, config, started, train, partial(advice, config, outer.world_size))
    if not outer.rank:
        drawn(result.folder, result.exit_code)
    return result.with_curves()


def drawn(folder: Path, exit_code: int) -> None:
    """Plot a run that is done or was stopped, and print the paths. The run is saved, so an error is only a warning."""
    if 0 < exit_code <= 128:  # failed
        return
    try:
        with working("plotting the run", print):
            from gptlite.satellites.plots.run import plot_run

            plots = plot_run(folder)
    except Exception as error:
        print(f"warning: the run was not plotted: {one_line(error)}")
        return
    for name, path in plots.items():
        print(printable(f"{f'{name}:':<10} {path}"), flush=True)


def predicted(config: Config, world: int) -> str:
    """Return the words of the banner on the predicted memory of the ranks."""
    with working("predicting the memory of a rank", print):
        from gptlite.satellites.plan.banner import memory_words

        return memory_words(config, world)


def advice(config: Config, world: int) -> list[str]:
    """Return lines on settings that need less memory."""
    from gptlite.satellites.plan.advice import advice_lines

    return advice_lines(config, world)
