"""Stopped anywhere and taken up again, the bytes are those of work that was never stopped."""

import errno
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marking import marked
from run_files import snapshot

from gptlite.errors import ConfigError
from gptlite.files import write_whole
from preprocess import killed
from preprocess.corpora import as_jsonl, made_up, prepare, tree

POINTS = 20


def start(folder: Path, at: int, *more: str) -> subprocess.Popen[str]:
    """Preprocessing of the corpus in `folder`, which kills itself at file event `at`."""
    arguments = [f"input={folder / 'in'}", "tokenizer=byte", f"output={folder / 'out'}", "workers=1"]
    more = (*more, "validation_fraction=0.2", "on_error=skip")
    command = [sys.executable, str(killed.__file__), str(at), *arguments, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder: Path, *more: str, at: int = 0, code: int = 0) -> tuple[str, str]:
    """What `start` printed, once it has ended with this exit code."""
    process = start(folder, at, *more)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    return output, errors


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with lines for 6 saves, one in ten bad, and a text file."""
    (tmp_path / "in").mkdir()
    lines = as_jsonl(made_up(5, 120)).splitlines(keepends=True)
    lines[5::10] = [b"bad\n"] * len(lines[5::10])
    (tmp_path / "in" / "a.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "in" / "b.txt").write_text("\n".join(made_up(6, 20)))
    return tmp_path


@pytest.mark.parametrize("first", marked(range(0, POINTS, 5), slow=1, name=lambda point: f"points{point}"))
def test_killed_and_taken_up_again_gives_the_same_bytes(corpus: Path, first: int) -> None:
    output, _ = finish(corpus)
    expected, events = snapshot(corpus / "out"), int(output.split("events=")[1])
    assert events > 150
    assert {"skipped.jsonl", "train.bin", "val.idx", "tokenizer/definition.json"} <= expected.keys()
    (corpus / "out").rename(corpus / "expected")
    rng = random.Random(first)
    for place in rng.sample(range(1, events - 5), 5):
        finish(corpus, at=place, code=-signal.SIGKILL)
        finish(corpus)
        assert snapshot(corpus / "out") == expected, place
        assert sorted(path.name for path in corpus.iterdir()) == ["expected", "in", "out"]
        shutil.rmtree(corpus / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_workers_end_with_it_and_the_same_command_goes_on(corpus: Path, number: int, code: int) -> None:
    many = as_jsonl(made_up(7, 4000))
    (corpus / "in" / "c.jsonl").write_bytes(many * 8)
    process = start(corpus, 0)
    deadline = time.monotonic() + 60
    while not (corpus / "out.partial" / "state.json").exists():  # it is at work
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (corpus / "in" / "c.jsonl").write_bytes(many)  # another file: that is refused, and nothing lost
    assert "c.jsonl has changed); give the same, or" in finish(corpus, code=2)[1]
    finish(corpus, "overwrite=true")


@pytest.mark.parametrize("save", [0, 1, 4])
def test_a_disk_full_at_a_save_costs_only_what_came_after_the_last_one(corpus: Path, monkeypatch, save: int) -> None:
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks.BLOCK", 2000)
    monkeypatch.setattr("gptlite.satellites.preprocess.run.SAVED_BYTES", 20_000)
    prepare(corpus / "in", corpus / "expected", on_error="skip")
    saves = iter(range(99))

    def full(path: Path, content: str) -> None:
        if next(saves) == save:
            raise OSError(errno.ENOSPC, "no space left on device")
        write_whole(path, content)

    monkeypatch.setattr("gptlite.satellites.preprocess.output.write_whole", full)
    with pytest.raises(OSError, match="no space left"):
        prepare(corpus / "in", corpus / "out", on_error="skip")
    said: list[str] = []
    prepare(corpus / "in", corpus / "out", on_error="skip", log=said.append)
    assert tree(corpus / "out") == tree(corpus / "expected")
    assert said[0].startswith("resuming after") == bool(save)


def test_a_rerun_with_other_settings_is_refused_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(as_jsonl(made_up(8, 50)) + b"bad\n")
    with pytest.raises(ConfigError, match="it is not JSON"):
        prepare(tmp_path / "in", tmp_path / "out")
    for options, said in (
        ({"field": "body"}, r"has other settings \(field was 'text', now it is 'body'\)"),
        ({"validation_fraction": 0.1}, "validation_fraction was 0.2, now it is 0.1"),
        ({"format": "text"}, "a.jsonl was jsonl, now it is text"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(tmp_path / "in", tmp_path / "out", **options)
    (tmp_path / "in" / "b.jsonl").write_bytes(as_jsonl(["more"]))
    with pytest.raises(ConfigError, match="number of input files was 1, now it is 2"):
        prepare(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "b.jsonl").unlink()
    assert prepare(tmp_path / "in", tmp_path / "out", on_error="skip", workers=0).counts.skipped == 1


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["text"]))
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being written by another process"):
            prepare(tmp_path / "a.jsonl", tmp_path / "out")
