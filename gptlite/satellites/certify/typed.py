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
from gptlite.errors import ConfigError, one_line
from gptlite.files import write_whole
from gptlite.satellites.certify.rows import Row

ANSWER = "types.json"
SECONDS = 600.0
INSTALL = "not checked: pip install spmd-types"


def check_types(config: Config, world: int, folder: Path) -> Row:
    """Check the types of a configuration on `world` ranks."""
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
    process = subprocess.run(
        [sys.executable, "-P", "-m", "gptlite.satellites.certify.typed", str(folder), str(world)],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if process.returncode or not (folder / ANSWER).exists():
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return Row("types", False, f"the check ended with exit code {process.returncode}: {last:.200}")
    answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    return Row("types", answer["passed"], answer["words"], uncovered=tuple(answer["holes"]))


def main() -> None:
    """Check the types, and write the answer to the folder."""
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"), imports=True)
    try:
        from gptlite.satellites.certify.types.check import check_types as check

        report = check(config, world)
        words = f"{report.collectives:,} collectives of {world:,} ranks have the types they need"
        answer = {"passed": report.passed, "words": words if report.passed else report.message}
        answer["holes"] = [f"types: {each}" for each in report.holes]
    except ModuleNotFoundError as error:
        answer = {"passed": None, "words": INSTALL, "holes": [f"types: {INSTALL}"]}
        if error.name != "spmd_types":
            answer["words"] = f"not checked: {error}"
    except ConfigError as error:
        answer = {"passed": False, "words": one_line(error), "holes": []}
    write_whole(folder / ANSWER, json.dumps(answer))


if __name__ == "__main__":
    main()
