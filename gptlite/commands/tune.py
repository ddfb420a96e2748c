"""The fastest layout by measuring: the plan's best few train for some steps, the best of them becomes a preset.

gptlite tune [KEY=VALUE of train] [k=5] [steps=10] [name=tuned] [out=presets] [minutes=10] [overwrite=false]

k: layouts measured, with other degrees or another ZeRO stage each; steps: of each; minutes: that one may take. The
preset is OUT/parallelism/NAME.yaml, used as `gptlite train --config-dir OUT parallelism=NAME`. What was measured is
in OUT/parallelism/NAME.json. If none of the k runs, the plan's next ones are tried, and at last the one that takes
least memory. Exit codes: 0 a preset was measured; 1 nothing ran, and the preset is the plan's word alone; 2 refused.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gptlite.commands.plan import planned_config, separated
from gptlite.commands.train import guarded
from gptlite.errors import ConfigError
from gptlite.invocation import localized


@dataclass
class Arguments:
    """The tool's own part of the command line."""

    k: int = 5
    steps: int = 10
    name: str = "tuned"
    out: str = "presets"
    minutes: float = 10.0
    overwrite: bool = False


def main() -> NoReturn:
    """Runs the command line and exits."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Plans, measures and writes; returns the exit code. Raises ConfigError before anything runs."""
    if {"-h", "--help"} & set(arguments):
        print(localized(__doc__ or "").strip())
        return 0
    settings, given = separated(Arguments, arguments, "k", "steps", "minutes")
    if not settings.name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"name={settings.name}: a preset's name is letters, digits, - and _")
    preset = Path(settings.out).expanduser() / "parallelism" / f"{settings.name}.yaml"
    if preset.exists() and not settings.overwrite:
        raise ConfigError(f"{preset} exists; give another name=, or overwrite=true")
    config = planned_config(given)
    from gptlite.plan.planning import make_plan
    from gptlite.plan.tuning import TRIED, tune

    plan = make_plan(config, wanted=TRIED * settings.k)
    return tune(plan, preset, settings.k, settings.steps, 60 * settings.minutes)
