"""tools/preprocess.py in small shards, killed by itself: python killed.py AT KEY=VALUE...

AT is the number of the file event (a file opened to be written, renamed, removed, a folder made) at which it gets
SIGKILL from itself; 0 never, and then the number of events is printed.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "tempfile.mkstemp"}


def main() -> None:
    at, sys.argv[1:] = int(sys.argv[1]), sys.argv[2:]
    count = 0

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS or (event == "open" and str(arguments[1])[:1] in "wax"):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    from gptlite.preprocess import blocks, run

    blocks.BLOCK, run.SHARD_BYTES = 2000, 20_000
    sys.addaudithook(hear)
    try:
        runpy.run_path(str(Path(__file__).parents[2] / "tools" / "preprocess.py"), run_name="__main__")
    finally:
        print(f"events={count}")


if __name__ == "__main__":
    main()
