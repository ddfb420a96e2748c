"""`gptlite preprocess`, which saves often, killed by itself: python killed.py AT KEY=VALUE...

AT is the number of the event (a file opened to be written, renamed, removed or brought to the disk, a folder made,
tokens written) at which it gets SIGKILL from itself, in the middle of a write; 0 never, and then the number of events
is printed.
"""

import os
import signal
import sys

EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync", "os.write", "tempfile.mkstemp"}


def main() -> None:
    at, sys.argv[1:] = int(sys.argv[1]), sys.argv[2:]
    count = 0

    def hear(event: str, arguments: tuple[object, ...] = ()) -> None:
        nonlocal count
        if event in EVENTS or (event == "open" and str(arguments[1])[:1] in "wax"):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    from gptlite.commands.preprocess import main as preprocess
    from gptlite.satellites.corpus.indexed import IndexedWriter
    from gptlite.satellites.preprocess import blocks, run

    blocks.BLOCK, blocks._PART, run.SAVED_BYTES = 2000, 500, 20_000
    append, fsync = IndexedWriter._append, os.fsync

    def append_half(writer: IndexedWriter, data: bytes) -> None:
        if count + 1 == at:
            writer._bin.write(data[: len(data) // 2])
            writer._bin.flush()
        hear("os.write")
        append(writer, data)

    def heard_fsync(descriptor: int) -> None:
        hear("os.fsync")
        fsync(descriptor)

    IndexedWriter._append, os.fsync = append_half, heard_fsync
    sys.addaudithook(hear)
    try:
        preprocess()
    finally:
        print(f"events={count}")


if __name__ == "__main__":
    main()
