"""The command `gptlite train`: compose, check, launch. Each kind of failure has its exit code, and prints one line."""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gptlite.config import CONF_DIR, SCHEMAS, choices, help_text, register, saved_overrides, typed
from gptlite.config.messages import refusals
from gptlite.config.plugins import import_plugins, named_in
from gptlite.config.warm_start import with_model
from gptlite.errors import ConfigError
from gptlite.launch.starter import is_main, let_main_speak, refuse_sweep

SHOWING = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc"}  # Hydra's, which run nothing
EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")
def run(raw: DictConfig) -> float | None:
    """One job: of a single run or, under --multirun, of a sweep. The latter's return value is its loss."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        if code := guarded(refuse_sweep):  # an experiment may be a sweep, unseen by `command`
            sys.exit(code)
        from gptlite.sweep.job import run_cell

        return run_cell(raw)
    sys.exit(guarded(lambda: train(raw)))  # by SystemExit: Hydra has words of its own for an exception


def train(raw: DictConfig) -> int:
    """Checks and launches a composed configuration; returns its exit code."""
    started = time.monotonic()
    config = typed(raw)
    config.run.overrides = list(HydraConfig.get().overrides.task)
    from gptlite.launch.launcher import launch  # torch comes with it: not before the configuration stands

    return launch(config, started)


def main() -> NoReturn:
    """Runs the command line and exits with DESIGN's codes: 0 done, 2 refused, 128+signal stopped, 1 anything else."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print, and we print one line of it
    sys.exit(guarded(command))


def command() -> int:
    """What the arguments ask for: help, or a run composed from them and from what its folder remembers."""
    with refusals():
        flags, overrides = sort_arguments(sys.argv[1:])
        if {"-h", "--help"} & set(flags):
            import_plugins(named_in(overrides))
            print(help_text(overrides))
            return 0
        presets = any(re.match(r"\+?sweep=", each) for each in overrides) and not SHOWING & set(flags)
        if {"-m", "--multirun"} & set(flags) and (shown := SHOWING & set(flags)):
            raise ConfigError(
                f"{min(shown)} shows one configuration, and -m has many; leave out -m, give one value a key"
            )
        if {"-m", "--multirun"} & set(flags) or presets:
            return sweep(flags, overrides)
        if given := next((each for each in overrides if each.startswith("hydra.sweep.")), None):
            raise ConfigError(f"{given} is of sweeps alone; add -m, or give run.dir=... for one run")
        overrides = [*saved_overrides(overrides), *overrides]
        import_plugins(named_in(overrides))
        sys.argv[1:] = [*flags, *with_model(overrides, print_once)]
        return jobs()


def sweep(flags: list[str], overrides: list[str]) -> int:
    """Runs a sweep, a new one or what is left of the one in its folder; returns its exit code."""
    from gptlite.sweep.begin import sweep_overrides

    refuse_sweep()
    sys.argv[1:] = ["--multirun", *(each for each in flags if each not in ("-m", "--multirun"))]
    overrides = sweep_overrides(overrides)
    import_plugins(named_in(overrides))
    sys.argv += with_model(overrides, print_once)
    return jobs()


def print_once(text: str) -> None:
    """A line of rank 0, not where a composed configuration goes."""
    if is_main():
        print(text, file=sys.stderr, flush=True)


def jobs() -> int:
    """Hands the command line to Hydra; returns the exit code."""
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.__cause__, Exception):  # of a sweep
            raise ended.__cause__ from None
        raise
    return 0


def sort_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides, which Hydra only reads when nothing stands between them."""
    overrides = [each for each in arguments if re.match(r"[+~]*[\w./@:]+=|~\w", each)]
    for group in SCHEMAS:
        if f"{group}=null" in overrides:
            raise ConfigError(f"{group}=null: a run needs one; {choices(group)}")
    return [each for each in arguments if each not in overrides], overrides


def guarded(action: Callable[[], int | None]) -> int:
    """The exit code of an action, its failure printed: in one line where a user caused it, with a traceback else."""
    try:
        return action() or 0
    except ConfigError as error:
        if is_main():
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # under torchrun every rank is refused, and one says so
            let_main_speak()
        return EXIT_REFUSED
    except KeyboardInterrupt:
        if is_main():
            print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:  # a full disk, a missing permission: the trace is in train.log, if there is one
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
