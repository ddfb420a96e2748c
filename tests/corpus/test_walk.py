"""One walk for text, records, rows and images: linked folders are followed, and nothing is left out silently."""

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from gptlite.errors import ConfigError
from gptlite.satellites.corpus.streaming import _local
from gptlite.satellites.corpus.text import find_files, newly_followed
from gptlite.satellites.images.folder import find_images
from gptlite.satellites.images.rows import _files
from gptlite.satellites.preprocess.inputs import find_sources


def images(folder: Path) -> list[str]:
    return [f"{folder}/{name}" for name in find_images(folder)[1]]


WALKS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "text": ("a.txt", lambda folder: [str(file) for file in find_files(str(folder))]),
    "input": ("a.jsonl", lambda folder: [source.path for source in find_sources(str(folder), "auto")]),
    "glob": ("a.jsonl", lambda folder: [source.path for source in find_sources(f"{folder}/**/*.jsonl", "auto")]),
    "stream": ("a.parquet", lambda folder: _local(str(folder))[1]),
    "rows": ("a.csv", lambda folder: [f"{folder}/{name}" for name, _ in _files(folder)]),
    "images": ("a.png", images),
}
each_walk = pytest.mark.parametrize("walk", WALKS)


@pytest.fixture
def found(tmp_path: Path, walk: str) -> Callable[[], list[str]]:
    """A corpus with one file in a folder, and what its walk finds, below the corpus."""
    corpus, outside = tmp_path / "corpus", tmp_path / "outside"
    name, find = WALKS[walk]
    for folder in (corpus / "own", outside):
        folder.mkdir(parents=True)
        (folder / name).write_text("text")
    return lambda: [Path(file).relative_to(corpus).as_posix() for file in find(corpus)]


@each_walk
def test_linked_folders_are_followed(found, tmp_path, walk):
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "outside")
    name = WALKS[walk][0]
    assert found() == [f"linked/{name}", f"own/{name}"]


@each_walk
@pytest.mark.parametrize("target", [".", "..", "../own"])
def test_a_link_to_a_folder_that_contains_it_is_named(found, tmp_path, walk, target):
    (tmp_path / "corpus" / "own" / "loop").symlink_to(target)
    with pytest.raises(ConfigError, match=f"corpus/own/loop is a link to {target}, which contains it; remove the link"):
        found()


# A glob names files, and no folders that may be missing.
@pytest.mark.parametrize(("walk", "name"), [each for each in product(WALKS, ("sub", "b")) if each != ("glob", "sub")])
def test_a_broken_link_is_named(found, tmp_path, walk, name):
    link = tmp_path / "corpus" / "own" / (name if name == "sub" else f"b{Path(WALKS[walk][0]).suffix}")
    link.symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=f"{link.name} is a broken link to .*unmounted; repair or remove it"):
        found()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
@each_walk
def test_a_folder_that_cannot_be_read_is_named(found, tmp_path, walk):
    (tmp_path / "corpus" / "own").chmod(0)
    try:
        with pytest.raises(ConfigError, match="own"):
            found()
    finally:
        (tmp_path / "corpus" / "own").chmod(0o700)


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    """As above, also for root."""

    def walk(folder, onerror, followlinks):
        onerror(PermissionError(13, "Permission denied", f"{folder}/closed"))
        yield from ()

    monkeypatch.setattr("gptlite.satellites.corpus.walk.os.walk", walk)
    with pytest.raises(ConfigError, match=r"data.path: .*closed.*[Pp]ermission denied"):
        find_files(str(tmp_path))


def test_linked_folders_that_were_left_out_are_named(tmp_path):
    corpus, outside = tmp_path / "corpus", tmp_path / "outside"
    for folder in (corpus, outside):
        folder.mkdir()
        (folder / "a.txt").write_text("text")
    assert newly_followed(str(corpus)) == ""
    (corpus / "linked").symlink_to(outside)
    assert newly_followed(str(corpus)) == (
        f"; its linked folder {corpus}/linked is read now, and an earlier gptlite left it out: move it away to resume"
    )
    (tmp_path / "whole").symlink_to(corpus)  # data.path itself may be a link
    assert f"{tmp_path}/whole/linked is read now" in newly_followed(str(tmp_path / "whole"))
    (corpus / "linked").unlink()
    assert newly_followed(str(tmp_path / "whole")) == ""
