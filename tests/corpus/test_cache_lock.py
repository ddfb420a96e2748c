"""Many at once: a folder is made by one of them, and nothing else stays behind."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptlite.satellites.corpus.cache import cached_folder


def test_one_makes_and_all_get_it(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.02)
        (folder / "data").write_text("whole")

    def want(number: int) -> Path:
        return cached_folder(tmp_path, "text", {"n": str(number % 3)}, make, lambda line: None)

    with ThreadPoolExecutor(16) as threads:
        folders = list(threads.map(want, range(48)))
    assert len(made) == 3
    assert len(set(folders)) == 3
    assert all((folder / "data").read_text() == "whole" for folder in folders)
    assert sorted(tmp_path.iterdir()) == sorted(set(folders))


def test_a_failure_leaves_nothing_and_the_next_in_line_tries(tmp_path: Path) -> None:
    tries = []

    def make(folder: Path) -> None:
        tries.append(folder)
        (folder / "half").write_text("")
        time.sleep(0.02)
        if len(tries) < 4:
            raise ValueError("no")

    def want(_: int) -> Path | None:
        try:
            return cached_folder(tmp_path, "text", {}, make, lambda line: None)
        except ValueError:
            return None

    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(want, range(8)))
    assert len(tries) == 4
    assert folders.count(None) == 3
    assert [path.name for path in tmp_path.iterdir()] == [next(f for f in folders if f).name]
