"""Launcher of several ranks for `launch`, in a process of its own: `main` is its program."""

import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from gptlite.launch.worker import die_with


def main() -> NoReturn:
    """Run the configuration in a folder. The arguments are the folder, the number of ranks, a time and a process id.

    The time is when the run began, in time.monotonic() seconds; this process ends when the given one does, and its
    ranks with it. `ended.json` in the folder has the exit code, or why the run was refused or failed. SIGHUP ends the
    ranks at once; other signals are handled as by the command.
    """
    folder, world, started, parent = sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    die_with(int(parent))
    from gptlite.launch.launcher import keep_freed_memory

    keep_freed_memory()  # before anything creates tensors
    from gptlite.config import from_yaml
    from gptlite.errors import ConfigError
    from gptlite.files import write_whole
    from gptlite.launch.api import ANSWER
    from gptlite.launch.launcher import start_ranks

    answer = {}
    try:
        config = from_yaml(Path(folder, "config.yaml").read_text(encoding="utf-8"), imports=True)
        ended = start_ranks(config, int(world), float(started))
        answer = {"exit_code": ended.exit_code, "reason": ended.reason}
    except ConfigError as error:
        answer = {"refused": str(error)}
    write_whole(Path(folder, ANSWER), json.dumps(answer))
    sys.exit(0)
