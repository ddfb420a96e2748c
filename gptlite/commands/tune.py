"""Find the fastest layout by measurement: train with the k best layouts of the plan, and write the fastest as a preset.

gptlite tune [KEY=VALUE of train] [k=5] [steps=10] [name=tuned] [out=presets] [minutes=10] [overwrite=false]

k: number of layouts, which differ in degrees or ZeRO stage; steps: training steps per layout; minutes: time limit per
layout. The preset is OUT/parallelism/NAME.yaml, used as `gptlite train --config-dir OUT parallelism=NAME`. The
measurements are in OUT/parallelism/NAME.json. If none of the k layouts runs, the plan's next layouts are tried, and
finally the layout that needs the least memory. Exit codes: 0 a preset was measured; 1 nothing ran, and the preset is
only an estimate; 2 refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gptlite.commands.plan import planned_config, separated
from gptlite.commands.train import run_command
from gptlite.errors import ConfigError


@dataclass
class Arguments:
    """Command-line arguments of tune, in addition to train's."""

    k: int = 5
    steps: int = 10
    name: str = "tuned"
    out: str = "presets"
    minutes: float = 10.0
    overwrite: bool = False


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(arguments: list[str]) -> int:
    """Plan, measure and write the preset. Return the exit code. Raises ConfigError before anything runs."""
    settings, overrides = separated(Arguments, arguments, "k", "steps", "minutes")
    if not settings.name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"name={settings.name}: a preset's name may have letters, digits, - and _")
    preset = Path(settings.out).expanduser() / "parallelism" / f"{settings.name}.yaml"
    if preset.exists() and not settings.overwrite:
        raise ConfigError(f"{preset} exists; give another name=, or overwrite=true")
    config = planned_config(overrides)
    from gptlite.satellites.plan.planning import make_plan
    from gptlite.satellites.plan.tuning import TRIED, tune

    plan = make_plan(config, wanted=TRIED * settings.k)
    return tune(plan, preset, settings.k, settings.steps, 60 * settings.minutes)
