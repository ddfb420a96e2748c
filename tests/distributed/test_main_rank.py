"""What rank 0 does for all: its results, its refusals and its slowness reach every rank."""

import platform
import re

import pytest

from distributed.ranks import Ranks

CASES = "distributed.main_rank_cases:"
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
    assert first["no pickle"] != "nothing"
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
    assert re.search(rf": process \d+ on {re.escape(platform.node())} trains in it; wait, stop it, or", first["locked"])
    assert first["files"] == ["config.yaml", "result.json", "train.log"]
    assert first["log"] == ["before, on 0", "within, on 0"]
    assert "rank 1 on" in first["unseen"]
