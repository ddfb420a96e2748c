"""Entry point of the launcher process that `launch` starts for several ranks."""

import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from gptlite.invocation import prepare_process
from gptlite.launch.worker import die_with


def main() -> NoReturn:
    """Run the configuration in a folder. The arguments are the folder, the number of ranks, a time and a process id.

    The time is the start of the run in time.monotonic() seconds. This process and its ranks end when the process with
    the given id ends. The exit code, or the reason of a refusal or failure, is written to `ended.json` in the folder.
    SIGHUP ends the ranks at once; other signals are handled as by `gptlite train`.
    """
    prepare_process()
    folder, world, started, parent = sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes its child processes ignore it
    die_with(int(parent))
    from gptlite.launch.process import keep_freed_memory

    keep_freed_memory()  # before anything creates tensors
    from gptlite.config.saved import from_yaml
    from gptlite.errors import ConfigError
    from gptlite.files import write_whole
    from gptlite.start.api import ANSWER
    from gptlite.start.run import start_ranks

    answer = {}
    try:
        config = from_yaml(Path(folder, "config.yaml").read_text(encoding="utf-8"), imports=True)
        ended = start_ranks(config, int(world), float(started))
        answer = {"exit_code": ended.exit_code, "reason": ended.reason}
    except ConfigError as error:
        answer = {"refused": str(error)}
    write_whole(Path(folder, ANSWER), json.dumps(answer))
    sys.exit(0)
