"""The run that a command takes by default: the one that wrote a checkpoint last."""

import os
import sys
from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.manifest import FILE_NAME
from gptlite.errors import ConfigError, printable

LATEST = "latest"
RUNS = Path("outputs")  # where runs are by default, see conf/config.yaml


def newest_run(path: str, key: str) -> str:
    """Return `path`, or for LATEST the run folder below RUNS whose checkpoint was written last, which is printed.

    A folder of the name LATEST is a path. Raises ConfigError, naming `key`, if no run has a checkpoint.
    """
    if path != LATEST or Path(path).exists():
        return path
    runs: list[tuple[int, str]] = []
    for run, folders, _ in os.walk(RUNS):
        if "checkpoints" in folders:
            folders.clear()  # a run holds no other runs
            newest = [step / FILE_NAME for step in store.step_folders(Path(run, "checkpoints"))[:1]]
            runs += [(manifest.stat().st_mtime_ns, run) for manifest in newest if manifest.exists()]
    if not runs:
        raise ConfigError(f"{key}={LATEST}: no run below {RUNS}/ has a checkpoint; give {key}=RUN, a run folder")
    _, run = max(runs)
    print(printable(f"{key}={run} is the newest run"), file=sys.stderr, flush=True)
    return run
