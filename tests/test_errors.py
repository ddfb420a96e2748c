"""Messages with anything in them are printed in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptlite.config import load
from gptlite.config.cluster import ClusterConfig
from gptlite.config.plugins import import_plugins
from gptlite.errors import ConfigError, first_line, known_home, one_line, printable, text_of
from gptlite.launch.host_memory import out_of_memory
from gptlite.launch.worker import note_failure
from gptlite.satellites.plan.local import this_machine

CONTROL = "a\x1b[2J\rb\nc\td\x9b\u202e\u2066\u2028\ud800e"
ESCAPED = r"a\x1b[2J\rb\nc\td\x9b\u202e\u2066\u2028\ud800e"


class Unprintable(Exception):
    """An exception of a plug-in, whose own code fails to print it."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __str__(self) -> str:
        match self.way:
            case "raises":
                raise KeyError("no message")
            case "exits":
                sys.exit(0)
            case "number":
                return 7  # type: ignore[return-value]
        return CONTROL


def test_control_characters_are_escaped_once() -> None:
    assert printable(CONTROL) == ESCAPED
    assert printable(ESCAPED) == ESCAPED
    assert printable("é 漢 ώ") == "é 漢 ώ"
    assert printable("a\tb\nc\r", "\n\t") == "a\tb\nc\\r"


def test_a_config_error_is_one_line_without_control_characters() -> None:
    assert str(ConfigError(f"model.{CONTROL}=1")) == f"model.{ESCAPED}=1"


@pytest.mark.parametrize("way", ["raises", "exits", "number", "control"])
def test_an_exception_that_cannot_be_printed_is_one_line(way: str) -> None:
    error = Unprintable(way)
    for words in (one_line(error), f"{ConfigError(text_of(error))}", first_line(error)):
        assert words.isprintable()
        words.encode("utf-8")
    assert one_line(error).startswith("Unprintable: ")


@pytest.mark.parametrize("way", ["raises", "exits", "number", "control"])
def test_a_plug_in_that_raises_it_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / f"mute_{way}.py").write_text(f"from test_errors import Unprintable\nraise Unprintable({way!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(ConfigError) as refused:
        import_plugins([f"mute_{way}"])
    assert str(refused.value).startswith(f"plugins=[mute_{way}]: importing it raised Unprintable: ")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("way", ["raises", "exits", "number", "control"])
def test_a_rank_that_raises_it_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        raise Unprintable(way)
    except Unprintable as error:
        note_failure(error)
        reason = out_of_memory(error)
    assert reason == ""
    said = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "Unprintable: " in said["message"]
    assert "raise Unprintable(way)" in said["extraInfo"]["py_callstack"]


def test_a_run_that_raises_it_says_so_in_its_folder(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unprintable("raises")

    monkeypatch.setattr("gptlite.trainer.trainer.Trainer.run", fail)
    with pytest.raises(Unprintable):
        run("mute")
    status = json.loads((tmp_path / "mute" / "result.json").read_text())["status"]
    assert status == "failed: Unprintable: (its message cannot be printed: KeyError)"


def test_a_home_that_is_unknown_is_named_with_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and an entry in passwd
    words = r"^~/runs/a: no home folder is known for ~; set HOME, or give an absolute path$"
    with pytest.raises(ConfigError, match=words), known_home():
        Path("~/runs/a").expanduser()
    with pytest.raises(ConfigError, match=r"^run\.dir=~/runs/a: "):
        load(["data=synthetic", "run.dir='~/runs/a'"])
    assert this_machine(ClusterConfig(), [].append).devices_per_node  # needs no calibration
    with pytest.raises(RuntimeError, match="another"), known_home():
        raise RuntimeError("another")


def started(*redirections: str, code: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A process that prepares itself as commands do, and then runs the code. Its file descriptor 3 is our pipe."""
    program = f"from gptlite.invocation import prepare_process; prepare_process()\n{code}"
    shell = f'exec "$0" -c "$1" {" ".join(redirections)}'
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    return subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, program],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_closed_streams_are_opened_so_that_no_file_takes_their_place(tmp_path: Path) -> None:
    code = f"""
import sys
file = open({str(tmp_path / "data")!r}, "w")
print("printed"); print("said", file=sys.stderr); sys.stdin.read(); sys.stdout.flush(); sys.stderr.flush()
file.write(str(file.fileno() > 2)); file.close()
"""
    found = started("<&-", ">&-", "2>&-", code=code)
    assert (found.returncode, (tmp_path / "data").read_text()) == (0, "True")


def test_an_ascii_locale_reads_and_prints_other_names(tmp_path: Path) -> None:
    folder = tmp_path / "é漢"
    folder.mkdir()
    code = f"""
import os, sys
name, = os.listdir({str(tmp_path)!r})
print(ascii(name), name, chr(0xdc80)); print(name, file=sys.stderr)
"""
    for variables in ({"PYTHONUTF8": "0"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}):
        found = started(code=code, LC_ALL="C", PYTHONCOERCECLOCALE="0", **variables)
        assert found.returncode == 0, found.stderr
        first, second, third = found.stdout.split()
        assert first == rb"'\xe9\u6f22'"
        ascii_only = "PYTHONIOENCODING" in variables
        assert second == (rb"\xe9\u6f22" if ascii_only else "é漢".encode())
        assert third == rb"\udc80"


@pytest.mark.parametrize("place", [2, 4])
def test_a_switch_of_every_command_shows_the_traceback(place: int) -> None:
    words = ["-m", "gptlite", "data", "verify", "nowhere"]
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert (plain.returncode, plain.stderr.count("\n")) == (2, 1)
    asked = subprocess.run(
        [sys.executable, *words[:place], "--traceback", *words[place:]], capture_output=True, text=True
    )
    assert asked.returncode == 2
    assert asked.stderr.startswith("Traceback (most recent call last):\n")
    assert asked.stderr.endswith(plain.stderr)
