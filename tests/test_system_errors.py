"""An error of the operating system, in any command and at any call, is one line that names the file and what helps."""

import errno
import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoint.destruction.forks import ForkServer, shared_server
from checkpoint.destruction.lives import TINY
from marking import marked

from gptlite.commands.train import guarded
from gptlite.config.command_line import run_tool
from gptlite.errors import CURES, named, naming, system_error
from gptlite.files import write_whole
from gptlite.launch.worker import note_failure

CODES = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR]
CODES += [errno.ESTALE, errno.EIO]
OPEN = {errno.ENOSPC, errno.EIO, errno.ESTALE}  # what reading and writing an open file may raise
RUN = ["train", *TINY, "trainer.max_steps=2", "checkpoint.interval=1", "run.dir=run"]
PREPROCESS = ["preprocess", "input=docs.jsonl", "output=prepared", "tokenizer=byte", "workers=1"]
# A command, the number of calls that fail, and whether it needs a run.
COMMANDS = {
    "new": (["new", "mine"], False),
    "preprocess": ([*PREPROCESS, "validation_fraction=0.2"], False),
    "train-tokenizer": (["train-tokenizer", "input=docs.jsonl", "output=tokenizer", "vocab_size=300"], False),
    "data import": (
        ["data", "import", "tokens.bin", "format=nanogpt", "output=imported", "tokenizer=byte",
         "validation_fraction=0.2"], False),
    "train": ([*RUN[:-1], "run.dir=another"], True),
    "resume": ([*RUN, "trainer.max_steps=3"], True),
    "async": ([*RUN[:-1], "run.dir=another", "checkpoint.async_save=true"], True),
    "eval": (["eval", "checkpoint=run"], True),
    "generate": (["generate", "checkpoint=run", "prompt=1", "max_tokens=2"], True),
    "ls": (["checkpoint", "ls", "run"], True),
    "inspect": (["checkpoint", "inspect", "run"], True),
    "verify": (["checkpoint", "verify", "run"], True),
    "prune": (["checkpoint", "prune", "run", "keep=1", "yes=true"], True),
    "export": (["checkpoint", "export", "run", "exported"], True),
    "data inspect": (["data", "inspect", "prepared"], True),
    "data verify": (["data", "verify", "prepared"], True),
}  # fmt: skip
TRIALS = 8


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [json.dumps({"text": f"{number % 97} the cat sat on the mat. " * 4}) for number in range(100)]
    (folder / "docs.jsonl").write_text("\n".join(rows) + "\n")
    np.array([[number % 97, number % 89, 256] for number in range(400)], dtype="<u2").tofile(folder / "tokens.bin")
    return folder


@pytest.fixture(scope="module")
def world(server: ForkServer, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs, a run of two checkpoints, and prepared data."""
    folder = tmp_path_factory.mktemp("world") / "world"
    shutil.copytree(inputs, folder)
    for words in (RUN, [*PREPROCESS, "validation_fraction=0.2"]):
        code, _, text = Trial(server, folder, folder.parent, words).run(-1, 0)
        assert code == 0, text
    return folder


class Trial:
    """A command in a copy of a folder."""

    def __init__(self, server: ForkServer, source: Path, scratch: Path, words: list[str]) -> None:
        self.server, self.source, self.scratch, self.words = server, source, scratch, words

    def run(self, at: int, code: int) -> tuple[int, list[str], str]:
        """The exit code, the calls, and what was printed; the call `at` fails. Without one, in the folder itself."""
        folder, notes, output = self.source, self.scratch / "notes", self.scratch / "output"
        output.unlink(missing_ok=True)
        if at >= 0:
            shutil.rmtree(folder := self.scratch / "copy", ignore_errors=True)
            shutil.copytree(self.source, folder)
        arguments = (self.words, str(folder), [str(folder)], at, code, str(notes))
        ended = self.server.start("os_faults:run", *arguments, output=output).wait(120)
        return ended, notes.read_text().splitlines(), output.read_text()


def points(seen: list[str], seed: str) -> Iterator[tuple[int, int]]:
    """Calls and errors, one for each kind of call and file, in a random order."""
    chance, kinds = random.Random(seed), dict[str, list[int]]()
    for number, line in enumerate(seen):
        kinds.setdefault(re.sub(r"[0-9a-f]{6,}|\d+", "#", line), []).append(number)
    for kind in chance.sample(sorted(kinds), len(kinds)):
        codes = [code for code in CODES if code in OPEN or not kind.startswith(("read", "write", "pwrite", "fsync"))]
        yield chance.choice(kinds[kind]), chance.choice(codes)


def check(code: int, call: str, error: int, text: str) -> None:
    assert code in (0, 1, 2), text
    assert "Traceback" not in text, f"{call}: {text}"
    if code == 0:
        return
    lines = [line for line in text.splitlines() if line.startswith("error: ") or os.strerror(error) in line]
    assert lines, f"{call}: {text}"
    path = Path(call.split(" ", 1)[1])
    names = [re.sub(r"^\.tmp-|-[0-9a-f]{8}$", "", each.name) for each in (path, path.parent)]
    assert any(name in line for name in names for line in lines), f"{call}: {text}"
    assert any("; " in line or line.startswith(("DAMAGED", " ")) or "DAMAGED" in line for line in lines), text


@pytest.mark.parametrize("name", marked(list(COMMANDS), quick=1, slow=len(COMMANDS)))
def test_a_call_that_fails_is_one_line(request, server, tmp_path, name):
    words, needs = COMMANDS[name]
    source = shutil.copytree(request.getfixturevalue("world" if needs else "inputs"), tmp_path / "source")
    whole = Trial(server, shutil.copytree(source, tmp_path / "whole"), tmp_path, words)
    code, seen, text = whole.run(-1, 0)
    assert code == 0, text
    tried = Trial(server, source, tmp_path, words)
    for at, error in [*points(seen, name)][:TRIALS]:
        code, calls, text = tried.run(at, error)
        if len(calls) > at:  # the order of threads may differ
            check(code, calls[at], error, text)


@pytest.mark.parametrize("code", CODES)
def test_every_error_has_a_cure(tmp_path, code):
    words = system_error(OSError(code, os.strerror(code), str(tmp_path)), "give another run.dir")
    assert words.startswith(f"{tmp_path}: {os.strerror(code)}; ")
    assert "{" not in words
    assert code in CURES


def test_errors_of_open_files_name_them(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")

    def full(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(b"x")
            raise error

    with pytest.raises(OSError, match="No space"):
        full(tmp_path / "a")
    assert named(error).filename == str(tmp_path / "a")
    assert str(named(OSError(errno.EIO, "Input/output error"))) == "[Errno 5] Input/output error"
    with pytest.raises(OSError, match=r"b'$"), naming(tmp_path / "b"):
        raise OSError(errno.EIO, "Input/output error")


def test_a_message_is_one_printable_line():
    error = OSError(errno.EIO, "bad\nnews", "a\x1b[2J")
    assert system_error(error).startswith("a\\x1b[2J: bad news; check the disk")
    assert system_error(OSError("no number")) == "no number"


def test_a_full_disk_names_the_file_and_not_its_temporary_name(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        write_whole(tmp_path / "result.json", "{}")
    assert system_error(error.value).startswith(f"{tmp_path / 'result.json'}: No space left on device; free some")


def closed_socket() -> None:
    connection = socket.socket()
    connection.close()
    connection.send(b"x")


def wrong_process() -> None:
    os.kill(2**22 + 1, 0)  # above the largest process id


def too_many_files() -> None:
    raise OSError(errno.EMFILE, "Too many open files")  # as from socket.socket()


@dataclass
class NoOptions:
    """A tool without options."""


@pytest.mark.parametrize(
    ("action", "words"),
    [(closed_socket, "Bad file descriptor"), (wrong_process, "No such process"), (too_many_files, "")],
)
def test_only_errors_of_the_program_have_a_traceback(action, words, capsys, monkeypatch):
    assert guarded(action) == 1
    monkeypatch.setattr(sys, "argv", ["tool"])
    for text in (capsys.readouterr().err, tool_error(action, capsys)):
        if words:
            assert "Traceback" in text
            assert f"in {action.__name__}" in text
            assert text.splitlines()[-1].endswith(words)
        else:
            assert text.startswith("error: Too many open files; raise the limit")
            assert len(text.splitlines()) == 1


def tool_error(action: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^1$"):
        run_tool(lambda options: action(), NoOptions, None)
    return capsys.readouterr().err


def test_the_traceback_of_an_error_of_a_file_can_be_seen(tmp_path, capsys, monkeypatch):
    assert guarded((tmp_path / "absent").read_text) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path / 'absent'}: No such file or directory; ")
    monkeypatch.setattr(sys, "orig_argv", ["gptlite", "--traceback"])
    assert guarded((tmp_path / "absent").read_text) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith(line)


def test_a_rank_notes_an_error_of_the_program_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        closed_socket()
    except OSError as error:
        note_failure(error)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"].endswith("Bad file descriptor")
    assert "in closed_socket" in message["extraInfo"]["py_callstack"]


def test_a_rank_notes_the_file_and_the_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    note_failure(OSError(errno.ENOSPC, "No space left on device", "train.bin"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "OSError: train.bin: No space left on device; free some space, or give another path"
