"""Command `gptlite train`: compose, check, launch. Each kind of failure has an exit code and a one-line message."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gptlite.config.command_line import pipe_closed
from gptlite.config.compose import help_text, resumed, typed, with_elastic, with_whole_numbers
from gptlite.config.hydra_private import argument_parser
from gptlite.config.keys import choices
from gptlite.config.messages import flag_refusal, refusals
from gptlite.config.plugins import import_plugins, named_in
from gptlite.config.resume import not_resumed
from gptlite.config.schema import CONF_DIR, SCHEMAS, register
from gptlite.config.warm_start import with_model
from gptlite.errors import ConfigError, did_you_mean, known_home, print_failure, print_refusal, printable
from gptlite.invocation import localized, prepare_process
from gptlite.launch.hostfile import run as run_on_hosts
from gptlite.launch.hostfile import take_flags
from gptlite.launch.starter import is_main, let_main_speak, refuse_sweep
from gptlite.satellites.deepspeed import with_deepspeed

COMPLETION = {"--shell-completion", "-sc"}
SHOWING = {"--cfg", "-c", "--info", "-i", "--hydra-help"} | COMPLETION  # Hydra's flags that do not start a run
SHORT = {"-h", "-c", "-p", "-r", "-m", "-sc", "-cd", "-i"}
FLAGS = SHORT | SHOWING | set("--help --version --resolve --package --run --multirun --config-dir".split())
EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")
def run(raw: DictConfig) -> float | None:
    """Run one job: a single run or, with --multirun, a cell of a sweep, whose loss is returned."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        if code := guarded(refuse_sweep):  # an experiment preset may be a sweep, which `command` does not detect
            sys.exit(code)
        from gptlite.satellites.sweep.job import run_cell

        return run_cell(raw)
    sys.exit(guarded(lambda: train(raw)))  # SystemExit, as Hydra prints its own message for exceptions


def train(raw: DictConfig) -> int:
    """Check and launch a composed configuration. Return the exit code."""
    started = time.monotonic()
    config = typed(raw, HydraConfig.get().overrides.task)
    from gptlite.start.run import launch_command  # only after the configuration is checked

    return launch_command(config, started)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 2 refused, 128+signal stopped, 1 anything else."""
    prepare_process()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
    sys.exit(guarded(command))


def command() -> int:
    """Run the command line: print help, or run the configuration composed from the arguments and the run folder."""
    register()
    with refusals():
        file, port, words = take_flags(sys.argv[1:])
        if file is not None and not {"-h", "--help"} & set(words):
            run_on_hosts(file, port, words)
        flags, overrides = sort_arguments(words)
        overrides = with_deepspeed(overrides, print_once)
        import_plugins(named_in(overrides))
        overrides = with_whole_numbers(with_elastic(overrides))
        if {"-h", "--help"} & set(flags):
            print(help_of(flags, overrides))
            return 0
        check_flags(flags)
        presets = any(re.match(r"\+?sweep=", each) for each in overrides) and not SHOWING & set(flags)
        presets = presets and "hydra.mode=RUN" not in overrides  # the command of one cell
        if {"-m", "--multirun"} & set(flags) and (shown := SHOWING & set(flags)):
            raise ConfigError(
                f"{min(shown)} shows one configuration, but -m has several; leave out -m, and give one value per key"
            )
        if {"-m", "--multirun"} & set(flags) or presets:
            return sweep(flags, overrides)
        if given := next((each for each in overrides if each.startswith("hydra.sweep.")), None):
            raise ConfigError(f"{given} is only for sweeps; add -m, or give run.dir=... for one run")
        if not SHOWING & set(flags) and (line := not_resumed(overrides)):
            print_once(printable(line))
        sys.argv[1:] = [*flags, *with_model(resumed(overrides), print_once)]
        return completions() if COMPLETION & set(flags) else jobs()


def help_of(flags: list[str], overrides: list[str]) -> str:
    """Return the text of --help: on training, on sweeps, or on the groups and keys among the flags."""
    names, sweeps = [each for each in flags if not each.startswith("-")], {"-m", "--multirun"} & set(flags)
    if not names and not sweeps:
        return help_text(overrides)
    from gptlite.config.help_keys import group_help, sweep_help  # only if needed: --help alone is to be quick

    return "\n\n".join(group_help(name, overrides) for name in names) or sweep_help()


def sweep(flags: list[str], overrides: list[str]) -> int:
    """Run a new sweep, or the remaining jobs of the one in its folder. Return the exit code."""
    from gptlite.satellites.sweep.begin import sweep_overrides

    refuse_sweep()
    sys.argv[1:] = ["--multirun", *(each for each in flags if each not in ("-m", "--multirun"))]
    overrides = sweep_overrides(overrides)
    sys.argv += with_model(overrides, print_once)
    return jobs()


def completions() -> int:
    """Print Hydra's tab completions, without the schemas on which presets are based. Return 0."""
    with contextlib.redirect_stdout(io.StringIO()) as answer:
        jobs()
    print(re.sub(r"\S+_schema( |$)", "", answer.getvalue(), flags=re.MULTILINE), end="")
    return 0


def print_once(text: str) -> None:
    """Print a line on rank 0 only, to standard error, since --cfg prints its result to standard output."""
    if is_main():
        print(text, file=sys.stderr, flush=True)


def jobs() -> int:
    """Pass the command line to Hydra, which calls `run` for each job. Return the exit code."""
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.__cause__, Exception):  # raised by a sweep's job
            raise ended.__cause__ from None
        raise
    return 0


def sort_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate flags, with their values, from overrides, since Hydra requires overrides to be contiguous."""
    overrides = [each for each in arguments if re.match(r"[+~]*[\w./@:]+=|~\w", each)]
    for each, after in zip_longest(arguments, arguments[1:], fillvalue="-"):
        option = re.match(r"--?[A-Za-z][\w.-]+", each)
        value = None if after.startswith("-") or "=" in after else after
        if option and option[0] not in FLAGS and (refusal := flag_refusal(each, value)):
            raise ConfigError(refusal)
    for group in SCHEMAS:
        if f"{group}=null" in overrides:
            raise ConfigError(f"{group}=null: every run needs this section; {choices(group)}")
    return [each for each in arguments if each not in overrides], overrides


def check_flags(flags: list[str]) -> None:
    """Raise ConfigError for flags that Hydra does not have, instead of Hydra's usage text of many lines."""
    parser = argument_parser()
    parser.allow_abbrev = False  # gptlite looks for whole flags

    def refuse(message: str) -> NoReturn:
        known = re.findall(r"--?[a-z-]+", parser.format_usage())
        hint = did_you_mean(message.split()[-1], known)
        raise ConfigError(f"{message}{hint or '; --help and --hydra-help list the options'}")

    parser.error = refuse
    parser.parse_args(flags)


def run_command(run: Callable[[list[str]], int], usage: str | None) -> NoReturn:
    """Run a command with the arguments of the command line, and exit. `--help` prints `usage`, its docstring."""
    prepare_process()
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(localized(usage or "").strip())
        sys.exit(0)
    sys.exit(guarded(lambda: run(arguments)))


def guarded(action: Callable[[], int | None]) -> int:
    """Run an action and return its exit code. Prints a failure: a user's error, or that of a file, in
    one line, others with a traceback."""
    try:
        with known_home():
            return action() or 0
    except ConfigError as error:
        if is_main():
            print_refusal(error)
        else:  # under torchrun every rank is refused; only rank 0 prints the error
            let_main_speak()
        return EXIT_REFUSED
    except KeyboardInterrupt:
        if is_main():
            print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return pipe_closed()
    except Exception as error:  # of a full disk, say, train.log has the traceback if it was open
        print_failure(error)
        return EXIT_FAILED
