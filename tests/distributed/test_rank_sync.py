"""What rank 0 does for all: its results, its refusals and its slowness reach every rank."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.cells.checkpoints import Unknown, fails
from distributed.cells.run import Ranks
from gptlite.config import load
from gptlite.data.build import prepare as prepare_data
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.rank_sync import from_all, from_main, together
from gptlite.satellites.corpus import prepare as preparation
from gptlite.satellites.corpus.config import TextConfig
from gptlite.trainer import folder as run_folder
from gptlite.trainer.folder import RunFolder


def world() -> Mesh:
    return build_mesh(ParallelismConfig(data=2))


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


def words_of_ranks() -> dict[str, Any]:
    mesh, ran = world(), []
    everyone = from_all(mesh, lambda: mesh.rank * 10)
    answer = from_main(mesh, lambda: ran.append(mesh.rank) or {"path": Path("a")})
    return {
        "from_main": answer,
        "ran": ran,
        "from_all": everyone,
        "together": together(mesh, lambda: [lambda: mesh.rank])[0](),  # what no message has stays here
        "refused": fails(lambda: from_main(mesh, raising(ConfigError("a=1 is wrong")))),
        "interrupted": fails(lambda: from_main(mesh, raising(KeyboardInterrupt()))),
        "unknown": fails(lambda: from_main(mesh, raising(Unknown(1, 2)))).partition(":")[0],
        "no message": fails(lambda: from_main(mesh, lambda: lambda: None)).partition(":")[0],
        "both": fails(lambda: from_all(mesh, raising(ValueError(f"on {mesh.rank}")))),
        "one": fails(lambda: together(mesh, raising(OSError("full")) if mesh.rank == 1 else list)),
        "after it all": from_main(mesh, lambda: 1),
    }


def prepare(text: Path, cache: Path, seconds: float) -> tuple[int, dict[str, str], Path | None]:
    """Digests of the text made here, while rank 0 takes `seconds`; and what came of it."""
    mesh, digested, original = world(), [], preparation.text_digest

    def digest(*args: Any) -> str:
        digested.append(args)
        if len(digested) == 1:
            time.sleep(seconds)
        return original(*args)

    preparation.text_digest = digest
    try:
        data = prepare_data(settings(text, cache), 1, print, mesh)
    finally:
        preparation.text_digest = original
    return len(digested), data.identity, data.folder


def settings(text: Path, cache: Path) -> TextConfig:
    return TextConfig(
        path=str(text), cache_dir=str(cache), tokenizer="byte", sequence_length=8, validation_fraction=0.5,
        global_batch_size=2, micro_batch_size=1,
    )  # fmt: skip


def prepare_wrongly(text: Path, cache: Path) -> list[str]:
    """Text that is not there; and machines with disks of their own, whose text differs."""
    mesh = world()
    missing = fails(lambda: prepare_data(settings(text.with_name("none"), cache), 1, print, mesh))
    other = text.with_name("other.txt")
    original = preparation._opened
    if mesh.rank == 1:
        other.write_text(text.read_text()[::-1])
        preparation._opened = lambda _, config, log: original(cache / "not here", settings(other, cache), log)
    try:
        return [missing, fails(lambda: prepare_data(settings(text, cache), 1, print, mesh))]
    finally:
        preparation._opened = original


def run_folders(text: Path, root: Path) -> dict[str, Any]:
    """What is refused in a run folder, and by whom it is written."""
    mesh, seen = world(), {}
    if mesh.rank == 1:
        run_folder.write_whole = raising(AssertionError("rank 1 writes"))  # type: ignore[assignment]

    def make(name: str) -> RunFolder:
        return RunFolder(load(["data=text", f"data.path={text}", f"run.dir={root / name}"]), mesh)

    (root / "file").write_text("")
    seen["a file"] = fails(lambda: make("file"))
    run = make("run")
    run.log(f"before, on {mesh.rank}")
    with run.opened(run.config, None):  # type: ignore[arg-type]
        run.log(f"within, on {mesh.rank}")
        run.write_config()
        run.write_result({"status": "done"})
        from_main(mesh, lambda: None)  # all have written
        seen["locked"] = fails(lambda: make("run").opened(run.config, None).__enter__())  # type: ignore[arg-type]
    seen["files"] = sorted(path.name for path in (root / "run").iterdir())
    seen["log"] = (root / "run" / "train.log").read_text().splitlines()
    unseen = make("unseen")
    run_folder.APPEARS_SECONDS = 0.3
    if mesh.rank == 1:
        unseen.path = root / "elsewhere"
    seen["unseen"] = fails(lambda: unseen.opened(run.config, None).__enter__())  # type: ignore[arg-type]
    return seen


CASES = "distributed.test_rank_sync:"
LIMIT = 5.0  # seconds that a collective may take


@pytest.fixture(scope="module")
def two():
    with Ranks(2, collective_timeout=LIMIT) as ranks:
        yield ranks


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat\n" * 20)
    return path


def test_results_and_errors_reach_every_rank(two):
    first, second = two.run(CASES + "words_of_ranks")
    assert (first["ran"], second["ran"]) == ([0], [])
    assert (first["together"], second["together"]) == (0, 1)
    assert (first["unknown"], second["unknown"]) == ("Unknown", "RuntimeError")
    same = {key: first[key] for key in first if key not in ("ran", "together", "unknown")}
    assert same == {key: second[key] for key in same}
    assert str(first["from_main"]) == "{'path': PosixPath('a')}"
    assert first["from_all"] == [0, 10]
    assert first["refused"] == "ConfigError: a=1 is wrong"
    assert first["interrupted"].startswith("KeyboardInterrupt")
    assert first["no message"] == "TypeError"
    assert first["both"] == "ValueError: on 0"
    assert first["one"] == "OSError: full"
    assert first["after it all"] == 1


@pytest.mark.slow
def test_data_is_prepared_once_however_long_it_takes(two, text, tmp_path):
    first, second = two.run(CASES + "prepare", text, tmp_path / "cache", LIMIT + 2)
    assert first[0] > 0
    assert second[0] == 0
    assert first[1:] == second[1:]


def test_data_that_rank_0_refuses_or_that_differs_is_refused_by_all(two, text, tmp_path):
    (missing, differing), other = two.run(CASES + "prepare_wrongly", text, tmp_path / "cache")
    assert other == [missing, differing]
    assert missing.startswith("ConfigError: data.path=")
    assert "machines prepared different data" in differing


def test_a_run_folder_is_rank_0s(two, text, tmp_path):
    first, second = two.run(CASES + "run_folders", text, tmp_path)
    assert first == second
    assert first["a file"].startswith("ConfigError: run.dir=")
    assert re.search(rf": process \d+ on {re.escape(platform.node())} is training in it; wait, stop", first["locked"])
    assert first["files"] == ["config.yaml", "result.json", "train.log"]
    assert first["log"] == ["before, on 0", "within, on 0"]
    assert "rank 1 on" in first["unseen"]
