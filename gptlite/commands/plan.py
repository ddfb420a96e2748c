"""Estimate the fastest layouts of a model on a cluster. No GPU is needed.

gptlite plan model=gpt3-13b cluster=dgx-h100 cluster.nodes=8 data.global_batch_size=1024 [KEY=VALUE of train]
    [top=10] [out=FOLDER] [simulate=true] [tokens=300e9]
gptlite plan model=gpt2 cluster=dgx-h100 largest=true [out=FOLDER]    find the most layers that fit, for each layout
gptlite plan model=gpt3-small cluster=h200 cluster.nodes=8 links=true [measured=FILE] [out=FOLDER]    vary link speed
gptlite plan calibrate [seconds=60] [out=FILE]    measure this machine, for cluster=local

All valid layouts are compared; keys of `parallelism` and data.micro_batch_size stay fixed if they are given. The table
has the best layout for each combination of degrees and ZeRO stage, with the overrides that train with it, up to `top`
rows. `tokens` adds the time and cost of training on that many tokens. `out` is the folder for plan.png, timeline.png
and plan.json, or for largest.png. simulate=true simulates one rank of the best layout, the one that needs the most
memory, on fake tensors, and prints its exact memory. links=true predicts the layout's step at link speeds from 10 Mb/s
to 400 Gb/s, with dense gradients, each parallelism.compression and 1-bit Adam, and draws links.png, with the points of
`measured`, the rows.json of a benchmark of links.
Exit codes: 0 planned, 2 refused; if nothing fits, the error gives the missing memory.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from gptlite.commands.train import run_command
from gptlite.config.command_line import parse_arguments
from gptlite.config.compose import load
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.satellites.deepspeed import with_deepspeed


@dataclass
class Arguments:
    """Command-line arguments of plan, in addition to train's."""

    top: int = 10
    out: str = ""
    simulate: bool = False
    tokens: float | None = None
    largest: bool = False
    links: bool = False
    measured: str = ""
    seconds: float = 60.0


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(arguments: list[str]) -> int:
    """Plan or calibrate, and return the exit code. Raises ConfigError."""
    command = arguments.pop(0) if arguments and "=" not in arguments[0] else "plan"
    if command not in ("plan", "calibrate"):
        raise ConfigError(f"{command} is neither calibrate nor KEY=VALUE")
    own, overrides = separated(Arguments, arguments, "top", "tokens", "seconds")
    if command == "plan":
        plan(own, planned_config(overrides))
    elif overrides:
        raise ConfigError(f"{overrides[0]}: calibrate takes only seconds and out")
    else:
        calibrate(own)
    return 0


def separated(schema: type[Any], arguments: list[str], *positive: str) -> tuple[Any, list[str]]:
    """Return the arguments of `schema`, parsed, and the other arguments, for train. Raises ConfigError if a key in
    `positive` is not above 0."""
    own = [each for each in arguments if each.partition("=")[0] in schema.__dataclass_fields__]
    settings = parse_arguments(schema, own)
    for key in positive:
        value = getattr(settings, key)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"{key}={value} must be above 0")
    return settings, [each for each in arguments if each not in own]


def planned_config(overrides: list[str]) -> Config:
    """Return train's configuration for these arguments. Without a preset, the planner chooses the layout."""
    overrides = with_deepspeed(overrides)
    preset = any(each.partition("=")[0] in ("parallelism", "experiment") for each in overrides)
    config = load(overrides if preset else ["parallelism=auto", *overrides])
    if config.parallelism.elastic:
        raise ConfigError("parallelism.elastic=true: a plan is for one number of ranks; leave it out, and train with "
                          "the degrees of the plan")  # fmt: skip
    config.run.overrides = overrides  # without parallelism=auto, as the planner keeps the keys in these overrides fixed
    return config


def plan(own: Arguments, config: Config) -> None:
    """Print the plan as a table, and write its files if `out` is set."""
    from gptlite.satellites.plan import report as show
    from gptlite.satellites.plan.largest import largest_models
    from gptlite.satellites.plan.links import link_curves
    from gptlite.satellites.plan.planning import make_plan

    if own.links:
        curves = link_curves(config, Path(own.measured).expanduser() if own.measured else None)
        print(show.report_links(curves))
        files = [show.write_links(curves, Path(own.out).expanduser())] if own.out else []
    elif own.largest:
        cluster, found = largest_models(config)
        print(show.report_largest(config, cluster, found, own.top))
        files = [show.write_largest(cluster, found, Path(own.out).expanduser(), own.top)] if own.out else []
    else:
        made = make_plan(config, wanted=own.top)
        print(show.report(made, own.top, own.tokens))
        if own.simulate:
            print(show.simulated(made))
        files = show.write(made, Path(own.out).expanduser(), own.top) if own.out else []
    for file in files:
        print(f"written: {file}")


def calibrate(own: Arguments) -> None:
    """Measure this machine, and write the calibration file that cluster=local reads."""
    from gptlite.satellites.plan.calibrate import calibrate as measure
    from gptlite.satellites.plan.local import CALIBRATION, write_calibration

    file = Path(own.out or CALIBRATION).expanduser()
    write_calibration(file, measure(own.seconds, print))
    print(f"written: {file}")
