"""The fastest layouts of a model on a cluster, before a device of it is paid for. No GPU is needed.

gptlite plan model=gpt3-13b cluster=dgx-h100 cluster.nodes=8 data.global_batch_size=1024 [KEY=VALUE of train]
    [top=10] [out=FOLDER] [simulate=true] [tokens=300e9]
gptlite plan model=gpt2 cluster=dgx-h100 largest=true [out=FOLDER]    the most layers of that width that fit, by layout
gptlite plan calibrate [seconds=60] [out=FILE]    measure this machine, for cluster=local

Every legal layout is looked at; what you give of `parallelism` and data.micro_batch_size stays. The table has the best
of each combination of degrees and ZeRO stage, and the override line that trains it. With `out`, plan.png, timeline.png
and plan.json go there, or largest.png. simulate=true runs the best layout's fullest rank with fake tensors, for its
exact memory.
Exit codes: 0 planned, 2 refused: then nothing fits, and the line says by how much.
"""

import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from gptlite.commands.train import guarded
from gptlite.config import Config, load
from gptlite.config.command_line import parse_arguments
from gptlite.errors import ConfigError
from gptlite.invocation import localized


@dataclass
class Arguments:
    """The tool's own part of the command line."""

    top: int = 10
    out: str = ""
    simulate: bool = False
    tokens: float | None = None
    largest: bool = False
    seconds: float = 60.0


def main() -> NoReturn:
    """Runs the command line and exits."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Plans or calibrates; returns the exit code. Raises ConfigError."""
    if {"-h", "--help"} & set(arguments):
        print(localized(__doc__ or "").strip())
        return 0
    command = arguments.pop(0) if arguments and "=" not in arguments[0] else "plan"
    if command not in ("plan", "calibrate"):
        raise ConfigError(f"{command} is neither calibrate nor KEY=VALUE")
    own, given = separated(Arguments, arguments, "top", "tokens", "seconds")
    if command == "plan":
        plan(own, planned_config(given))
    elif given:
        raise ConfigError(f"{given[0]}: calibrate takes only seconds and out")
    else:
        calibrate(own)
    return 0


def separated(schema: type[Any], arguments: list[str], *positive: str) -> tuple[Any, list[str]]:
    """A tool's own arguments, some of which are above 0, and train's. Raises ConfigError."""
    own = [each for each in arguments if each.partition("=")[0] in schema.__dataclass_fields__]
    settings = parse_arguments(schema, own)
    for key in positive:
        value = getattr(settings, key)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"{key}={value} must be above 0")
    return settings, [each for each in arguments if each not in own]


def planned_config(given: list[str]) -> Config:
    """What train would run with these arguments, the layout left to the plan unless they choose a preset."""
    preset = any(each.partition("=")[0] in ("parallelism", "experiment") for each in given)
    config = load(given if preset else ["parallelism=auto", *given])
    config.run.overrides = given
    return config


def plan(own: Arguments, config: Config) -> None:
    """The table, and the pictures if they are wanted."""
    from gptlite.plan import report as show
    from gptlite.plan.largest import largest_models
    from gptlite.plan.planning import make_plan

    if own.largest:
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
    """Measures this machine and keeps what was found."""
    from gptlite.plan.calibrate import calibrate as measure
    from gptlite.plan.local import CALIBRATION, write_calibration

    file = Path(own.out or CALIBRATION).expanduser()
    write_calibration(file, measure(own.seconds, print))
    print(f"written: {file}")
