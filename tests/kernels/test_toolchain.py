"""Compiler processes that hang, or whose parent dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptlite.kernels.toolchain import BuildError, Compilers

HANGS = "sleep 1000 & echo $! > {file}.new; mv {file}.new {file}; wait"  # as g++ starts cc1plus and waits for it


def gone(pid: int) -> bool:
    """True once the process has ended, at most 10 s from now. A zombie has, too."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_compiler_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Compilers() as compilers, pytest.raises(BuildError, match=r"^/bin/sh did not end within 1 s; .* set CXX"):
        compilers.run(["/bin/sh", "-c", HANGS.format(file=file)], 1.0)
    assert gone(int(file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_compilers_end_with_the_process_that_started_them(tmp_path: Path, number: int) -> None:
    file = tmp_path / "pid"
    code = "\n".join(
        [
            "import sys",
            "from gptlite.kernels.toolchain import Compilers",
            "with Compilers() as compilers:",
            "    compilers.run(['/bin/sh', '-c', sys.argv[1]])",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, HANGS.format(file=file)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(10)
    finally:
        process.kill()
    assert gone(int(file.read_text()))


def test_output_and_exit_code_are_returned() -> None:
    with Compilers() as compilers:
        result = compilers.run(["/bin/sh", "-c", "echo said; exit 3"])
        assert (result.stdout, result.returncode) == ("said\n", 3)
        with pytest.raises(BuildError, match=r"^/nowhere does not run: "):
            compilers.run(["/nowhere"])
