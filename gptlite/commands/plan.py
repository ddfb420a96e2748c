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
from pathlib import Path
from typing import NoReturn

from gptlite.cli import guarded
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.invocation import localized

OWN = {"top": "10", "out": "", "simulate": "false", "tokens": "", "largest": "false", "seconds": "60"}


def main() -> NoReturn:
    """Runs the command line and exits."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Plans or calibrates; returns the exit code. Raises ConfigError."""
    if {"-h", "--help"} & set(arguments):
        print(localized(__doc__ or "").strip())
        return 0
    command = arguments[0] if arguments and "=" not in arguments[0] else "plan"
    rest = arguments[1:] if command != "plan" else arguments
    own = OWN | {key: value for key, _, value in (each.partition("=") for each in rest) if key in OWN}
    others = [each for each in rest if each.partition("=")[0] not in OWN]
    if command == "plan":
        return plan(own, others)
    if command != "calibrate":
        raise ConfigError(f"{command} is neither calibrate nor KEY=VALUE")
    if others:
        raise ConfigError(f"{others[0]}: calibrate takes only seconds and out")
    return calibrate(own)


def plan(own: dict[str, str], given: list[str]) -> int:
    """The table, and the pictures if they are wanted."""
    top, simulate = int(number(own, "top", int)), flag(own, "simulate")
    tokens = number(own, "tokens", float) if own["tokens"] else None
    if given and any(each.partition("=")[0] in ("parallelism", "experiment") for each in given):
        overrides = given
    else:
        overrides = ["parallelism=auto", *given]
    config = load(overrides)
    config.run.overrides = given
    if flag(own, "largest"):
        from gptlite import largest

        found = largest.largest_models(config)
        print(largest.report(config, *found, top))
        if own["out"]:
            print(f"written: {largest.draw(config, *found, top, Path(own['out']).expanduser())}")
        return 0
    from gptlite import plan_report as show
    from gptlite.planning import make_plan

    made = make_plan(config, wanted=top)
    print(show.report(made, top, tokens))
    if simulate:
        print(show.simulated(made))
    if own["out"]:
        for file in show.write(made, Path(own["out"]).expanduser(), top):
            print(f"written: {file}")
    return 0


def calibrate(own: dict[str, str]) -> int:
    """Measures this machine and keeps what was found."""
    from gptlite.plan.calibrate import calibrate as measure
    from gptlite.plan.local import CALIBRATION, write_calibration

    seconds = number(own, "seconds", float)
    file = Path(own["out"] or CALIBRATION).expanduser()
    write_calibration(file, measure(seconds, print))
    print(f"written: {file}")
    return 0


def number(own: dict[str, str], key: str, kind: type[int] | type[float]) -> float:
    """A positive number of the command line. Raises ConfigError."""
    try:
        value = kind(own[key])
    except ValueError:
        value = kind(0)
    if not 0 < value < 1e18:
        raise ConfigError(f"{key}={own[key]} is not a {'whole ' if kind is int else ''}number above 0")
    return value


def flag(own: dict[str, str], key: str) -> bool:
    """true or false. Raises ConfigError."""
    if own[key].lower() not in ("true", "false"):
        raise ConfigError(f"{key}={own[key]} is neither true nor false")
    return own[key].lower() == "true"
