"""Forked programs end, print and find modules as new Python processes do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from distributed.cells.run import TESTS, Ranks

SEEN = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), sys.path[:2], os.environ["GIVEN"], __name__]))
print(sorted(os.environ.keys() - {"LC_CTYPE"}))  # which Python sets in a locale of ASCII
"""


def new(*words: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("words", [("-c", SEEN), ("-m", "seen"), ("seen.py",)], ids=["code", "module", "file"])
def test_what_a_program_is_given(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    environment = {"PATH": os.environ["PATH"], "GIVEN": "x", "PYTHONPATH": "/somewhere"}
    found, expected = (
        run(*words, "a", "b c", folder=tmp_path, environment=environment).stdout.splitlines()
        for run in (forked.run, new)
    )
    assert found[1] == expected[1]
    seen, wanted = (json.loads(lines[0]) for lines in (found, expected))
    wanted[2][0] = wanted[2][0] or str(tmp_path)  # of -c
    assert seen == wanted


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", 3),
        ("print('out'); raise SystemExit('err')", 1),
        ("print('out'); 1 / 0", 1),
        ("print('out', flush=True); raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(print, 'out')", 0),
        ("import os; print('out', flush=True); os._exit(7)", 7),
    ],
)
def test_how_a_program_ends(code: str, status: int, tmp_path: Path) -> None:
    done = forked.run("-c", code, folder=tmp_path)
    assert (done.returncode, done.stdout) == (status, "out\n")
    assert ("err" in done.stderr) == ("err" in code)
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in code)


def test_a_program_does_not_find_the_modules_of_tests(tmp_path: Path) -> None:
    assert (TESTS / "token_folders.py").is_file()
    assert "No module named 'token_folders'" in forked.run("-c", "import token_folders", folder=tmp_path).stderr


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run("-c", "import os, time; open(str(os.getpid()), 'w'); time.sleep(60)", folder=tmp_path, timeout=1)
    (noted,) = tmp_path.iterdir()
    assert not Path("/proc", noted.name).exists()


def test_they_are_new_processes_in_the_slow_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert forked.run("-c", code, folder=tmp_path).stdout == "True\n"
    monkeypatch.setattr(Ranks, "fork", False)
    assert forked.run("-c", code, folder=tmp_path).stdout == "False\n"


LEFT = """
import forked
from distributed.cells.run import Ranks
left = forked.Popen(["python", "-c", "import time; time.sleep(600)"])
Ranks.end_server()
print(left.pid)
"""


@pytest.mark.slow
def test_what_a_test_left_running_ends_with_the_tests(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    done = new("-c", LEFT, folder=tmp_path, environment=environment)
    until = time.monotonic() + 20
    while Path("/proc", done.stdout.strip()).exists():
        assert time.monotonic() < until, done.stderr
        time.sleep(0.05)


@pytest.mark.slow
def test_programs_can_be_interrupted_though_the_tests_cannot(tmp_path: Path) -> None:
    """The background of a script ignores SIGINT, and hands this down."""
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-n", "1", f"{TESTS}/test_forked.py::test_how_a_program_ends"]
    command = [sys.executable, *words, "-k", "KeyboardInterrupt"]
    code = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({command[0]!r}, {command!r})"
    assert "1 passed" in new("-c", code, folder=TESTS.parent, environment=dict(os.environ)).stdout
