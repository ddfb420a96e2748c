"""Tuning never ends empty-handed: whatever fails, a preset is written, the best measured one if any ran."""

import json

import pytest

from gptlite.commands.plan import planned_config
from gptlite.config import load
from gptlite.satellites.plan import tuning
from gptlite.satellites.plan.planning import make_plan
from gptlite.satellites.plan.tuning import Trial, tune

GIVEN = ["data=synthetic", "data.vocab_size=300", "data.global_batch_size=16", "parallelism.sequence=false"]
GIVEN = [*GIVEN, "cluster=dgx-h100", "cluster.devices_per_node=4"]


@pytest.fixture(scope="module")
def plan():
    return make_plan(planned_config(GIVEN), log=lambda text: None)


def speeds(monkeypatch, answer):
    """Every trial answers with a speed, or None: it failed."""
    tried = []

    def measured(candidate, given, folder, steps, limit):
        tried.append(candidate)
        speed = answer(len(tried))
        return Trial(candidate, speed or 0.0, "" if speed else "out of memory", 1.0)

    monkeypatch.setattr(tuning, "measured", measured)
    return tried


def test_the_fastest_measured_wins_over_the_fastest_predicted(plan, tmp_path, monkeypatch, capsys):
    tried = speeds(monkeypatch, lambda number: 100.0 * number)
    assert tune(plan, tmp_path / "parallelism" / "a.yaml", k=3, steps=5, limit=60) == 0
    assert len(tried) == 3
    text = (tmp_path / "parallelism" / "a.yaml").read_text()
    assert "300 tokens/s over 5 steps" in text
    config = load([*GIVEN, *tuning.overrides(tried[2].work)])
    lines = dict(line.split(": ") for line in text.splitlines() if not line.startswith(("#", "defaults")))
    assert {key: str(getattr(config.parallelism, key)) for key in lines if key in ("tensor", "data", "zero")} == {
        key: value for key, value in lines.items() if key in ("tensor", "data", "zero")
    }
    assert "data.micro_batch_size=" in capsys.readouterr().out


def test_where_the_best_fail_the_next_ones_are_tried(plan, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda number: 50.0 if number == 5 else None)
    assert tune(plan, tmp_path / "parallelism" / "a.yaml", k=3, steps=5, limit=60) == 0
    assert len(tried) == 5
    rows = json.loads((tmp_path / "parallelism" / "a.json").read_text())
    assert [row["reason"] for row in rows] == ["out of memory"] * 4 + [""]


def test_where_all_fail_the_plans_best_is_written_and_said_to_be_untried(plan, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda number: None)
    assert tune(plan, tmp_path / "parallelism" / "a.yaml", k=2, steps=5, limit=60) == 1
    thriftiest = min(plan.found.ranked, key=lambda each: each.prediction.memory.total)
    assert thriftiest in tried
    assert "predicted, not measured" in (tmp_path / "parallelism" / "a.yaml").read_text()


def test_a_run_that_takes_too_long_is_ended(plan, tmp_path):
    started = tuning.time.monotonic()
    trial = tuning.measured(plan.best, GIVEN, tmp_path / "run", 5, limit=0.5)
    assert trial.tokens_per_second == 0
    assert "not finished within" in trial.reason
    assert tuning.time.monotonic() - started < tuning.STOP_SECONDS + 5
