"""Stage `types`: the types of the program's collectives at the true world size, in a process of its own.

This module is also the program of that process: its arguments are a folder with config.yaml, and the world size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.satellites.certify.rows import StageRow

ANSWER = "types.json"
SECONDS = 600.0
INSTALL = "pip install spmd-types"


def check_types(config: Config, world: int, folder: Path) -> StageRow:
    """Check the types of a configuration on `world` ranks."""
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
    program = [sys.executable, "-P", "-m", "gptlite.satellites.certify.typed", str(folder), str(world)]
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    try:
        process = subprocess.run(program, env=env, timeout=SECONDS, **quiet)
    except subprocess.TimeoutExpired:
        return StageRow("types", False, f"the check took more than {SECONDS:.0f} s")
    if process.returncode or not (folder / ANSWER).exists():
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return StageRow("types", False, f"the check ended with exit code {process.returncode}: {last:.200}")
    answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    return StageRow("types", answer["passed"], answer["words"], uncovered=tuple(answer["holes"]))


def main() -> None:
    """Check the types, and write the answer to the folder."""
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"), imports=True)
    try:
        from gptlite.satellites.certify.types.check import check_types as check

        report = check(config, world)
        figure = f"{report.collectives:,} collectives of {world:,} ranks have the types they need"
        answer = {"passed": report.passed, "words": figure if report.passed else report.message}
        answer["holes"] = [f"types: {each}" for each in report.holes]
    except ModuleNotFoundError as error:
        reason = INSTALL if error.name == "spmd_types" else str(error)
        answer = {"passed": None, "words": reason, "holes": [f"types: not checked: {reason}"]}
    except ConfigError as error:
        answer = {"passed": None, "words": str(error), "holes": [f"types: not checked: {error}"]}
    write_whole(folder / ANSWER, json.dumps(answer))


if __name__ == "__main__":
    main()
