"""`python tools/faults.py table`: two results compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptlite.config.schema import CONF_DIR


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CONF_DIR.parent / "tools"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Results of before (three faults, two caught), after (one of them) and of the slow tests (the other)."""
    kind = {
        "file": "gptlite/satellites/plan/cost.py",
        "area": "planner",
        "why": "",
        "tests": 1,
        "left": 0,
        "old": "a < b" + " c" * 40,
    }
    rows = [
        kind | {"id": str(i), "line": i, "new": f"a <= b{' c' * 40}", "verdict": "caught", "by": "t::test_a[x]"}
        for i in range(3)
    ]
    lost = {"verdict": "not caught", "by": None}
    found = {
        "before": [rows[0], rows[1], rows[2] | lost, rows[2] | lost | {"id": "9", "verdict": "no effect"}],
        "after": [rows[0] | {"verdict": "time limit", "by": "t::test_b"}, rows[1] | lost, rows[2] | lost | {"left": 3}],
        "slow": [rows[1] | {"by": "t::test_c"}],
    }
    for name, records in found.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    return {name: str(tmp_path / name) for name in found}


def table(capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    from fault_trials.table import Options, run

    assert run(Options(**options)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_compares_two_results(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(capsys, **files)
    assert lines[1].split() == ["planner", "3", "2", "1", "1", "2"]
    assert lines[2].split() == ["all", "3", "2", "1", "1", "2"]
    assert [line.split()[0] for line in lines[5:]] == [f"satellites/plan/cost.py:{i}" for i in range(3)]
    assert all("a < b c" in line and "-> a <= b c" in line for line in lines[5:])
    assert [line[81:] for line in lines[5:]] == ["b (time limit)", "slow: c", "not caught, 3 tes.."]
    assert max(map(len, lines)) <= 100
    assert len(table(capsys, **files, only="lost")) == 6
    assert len(table(capsys, **files, only="uncaught")) == 6


def test_the_table_as_markdown(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(capsys, **files, format="markdown")
    assert lines[:3] == [
        "| area | faults | caught before | caught after | lost | with slow |",
        "|---|--:|--:|--:|--:|--:|",
        "| planner | 3 | 2 | 1 | 1 | 2 |",
    ]
    assert lines[7].endswith("` | t::test_a[x] | t::test_b (time limit) |")
    assert table(capsys, before=files["before"], format="markdown")[4] == ""
