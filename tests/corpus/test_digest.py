"""A text is read once, and again whenever it may have changed."""

import os

import pytest

from gptlite.errors import ConfigError
from gptlite.satellites.corpus import text
from gptlite.satellites.corpus.text import scan, text_digest


@pytest.fixture
def files(tmp_path):
    """Two files; they are new, so a test says that they may be trusted."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(f"text of {path.name}")
    return paths


@pytest.fixture
def reads(monkeypatch):
    """One entry for each time that the text was read."""
    seen = []

    def counted(files, log):
        seen.append(files)
        return scan(files, log)

    monkeypatch.setattr(text, "scan", counted)
    monkeypatch.setattr(text, "_LARGE", 0)
    monkeypatch.setattr(text, "_SETTLED", -(1 << 62))
    return seen


def test_the_second_start_reads_nothing_and_says_the_same(files, reads, tmp_path):
    first = text_digest(files, tmp_path / "cache", print)
    assert first == text_digest(files, tmp_path / "cache", print) == scan(files)
    assert len(reads) == 1


@pytest.mark.parametrize("keep_time", [False, True])
def test_changed_text_is_noticed_though_size_and_even_time_are_the_same(files, reads, tmp_path, keep_time):
    first = text_digest(files, tmp_path, print)
    before = files[1].stat()
    files[1].write_text("TEXT of b.txt")
    if keep_time:
        os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[1].stat().st_size == before.st_size
    assert text_digest(files, tmp_path, print) == scan(files) != first


def test_other_files_and_another_order_are_other_texts(files, reads, tmp_path):
    for some in (files, files[:1], files[::-1]):
        assert text_digest(some, tmp_path, print) == scan(some)


def test_a_file_written_a_moment_ago_is_not_trusted_yet(files, reads, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_SETTLED", 3600 * 10**9)
    text_digest(files, tmp_path, print)
    text_digest(files, tmp_path, print)
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"x"', "\u00e9"])
def test_a_damaged_note_is_as_good_as_none(files, reads, tmp_path, content):
    first = text_digest(files, tmp_path, print)
    (note,) = tmp_path.glob(".digest-*.json")
    note.write_bytes(content.encode("latin-1"))
    assert text_digest(files, tmp_path, print) == first
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_reading(files, reads, tmp_path):
    assert text_digest(files, files[0] / "cache", print) == scan(files)


def test_refused_text_stays_refused(files, reads, tmp_path):
    files[0].write_bytes(b"caf\xe9")
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not UTF-8 at byte 3"):
            text_digest(files, tmp_path, print)
    files[0].unlink()
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read \(No such file"):
        text_digest(files, tmp_path, print)


def test_text_that_changes_while_it_is_read_is_refused(files, monkeypatch, tmp_path):
    def grows(files, log):
        files[0].write_text("longer than it was before")
        return scan(files, log)

    monkeypatch.setattr(text, "scan", grows)
    with pytest.raises(ConfigError, match="changed while it was read"):
        text_digest(files, tmp_path, print)


def test_a_small_text_leaves_no_note(tmp_path, files, monkeypatch):
    monkeypatch.setattr(text, "_LARGE", 1 << 20)
    assert text_digest(files, tmp_path / "cache", print) == scan(files)
    assert not (tmp_path / "cache").exists()


def test_many_small_files_are_a_large_text(files, reads, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_LARGE", sum(path.stat().st_size for path in files))
    for _ in range(2):
        assert text_digest(files, tmp_path / "cache", print) == scan(files)
    assert len(reads) == 1
