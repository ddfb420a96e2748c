"""Draws are legal, of several ranks, each another run, the same for a seed; and pairs of values meet."""

import os
import subprocess
import sys
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path

import pytest

from gptlite.config import load
from gptlite.satellites.certify.fuzz.axes import (
    AXES,
    DEFAULT,
    LARGEST_WORLD,
    MODEL_AXES,
    effective,
    model_overrides,
    overrides,
    row_name,
    world,
)
from gptlite.satellites.certify.fuzz.draw import Drawing, every_pair, first_draws, pairs_of
from gptlite.satellites.certify.fuzz.legal import composed, refusal

ROOT = Path(__file__).parents[3]
DRAWS = first_draws(seed=3, count=60)


def test_draws_are_legal_and_each_another_run_of_several_ranks():
    assert [refusal(overrides(draw)) for draw in DRAWS] == [""] * len(DRAWS)
    assert {2, 4} <= {world(draw) for draw in DRAWS} <= set(range(2, LARGEST_WORLD + 1))
    assert len({row_name(draw) for draw in DRAWS}) == len({tuple(overrides(draw)) for draw in DRAWS}) == len(DRAWS)
    assert [draw for draw in DRAWS if effective(draw) != draw] == []
    for draw in DRAWS:
        assert all(value in AXES[name].values for name, value in draw.items())


def test_no_draw_has_more_ranks_than_asked_for():
    draws = list(islice(Drawing(3, ranks=2), 20))
    assert {world(draw) for draw in draws} == {2}
    assert [refusal(overrides(draw)) for draw in draws] == [""] * 20


def test_draws_depend_on_the_seed_alone():
    assert first_draws(seed=3, count=9) == DRAWS[:9]
    assert first_draws(seed=4, count=9) != DRAWS[:9]


@pytest.mark.slow
def test_draws_are_the_same_in_processes_that_order_sets_in_other_ways():
    code = "from gptlite.satellites.certify.fuzz import axes, draw; "
    code += "print(*map(axes.row_name, draw.first_draws(3, 60)), sep='\\n')"
    for seed in "12":
        command, env = [sys.executable, "-c", code], os.environ | {"PYTHONHASHSEED": seed}
        out = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert out.split() == [*map(row_name, DRAWS)]


def test_the_same_model_comes_several_times_in_a_row():
    models = [tuple(model_overrides(draw)) for draw in DRAWS]
    assert 10 <= len(set(models)) <= len(DRAWS) / 2
    assert sum(a != b for a, b in pairwise(models)) == len(set(models)) - 1


def test_the_fast_composition_is_that_of_load():
    """Else draws would be judged by other checks than a user's command meets."""
    for draw in DRAWS[::10]:
        fast, whole = asdict(composed(overrides(draw))), asdict(load(overrides(draw)))
        assert whole.pop("run")["name"] == fast.pop("run")["name"]
        assert fast == whole


def test_pairs_are_counted_by_what_the_draws_have():
    drawing = Drawing(seed=3)
    draws = list(islice(drawing, 60))
    met = set().union(*map(pairs_of, draws))
    assert drawing.met == met
    assert met <= every_pair()
    assert drawing.missing == every_pair() - met - drawing.impossible.keys()
    assert len(met) > 0.6 * len(every_pair())  # 60 draws of 58 axes
    assert any(draw["tensor"] and draw["experts"] for draw in draws)


@pytest.mark.slow
def test_every_pair_meets_or_cannot_be_legal():
    drawing = Drawing(seed=3)
    for number, _ in enumerate(drawing):
        if not drawing.missing:
            break
        assert number < 3000
    assert drawing.met | drawing.impossible.keys() == every_pair()
    assert len(drawing.met) > 0.97 * len(every_pair())
    assert all(drawing.impossible.values())


def test_the_overrides_of_one_process_are_those_of_the_model_alone():
    draw = DEFAULT | {"tensor": "parallelism.tensor=2", "norm": "model.norm=rms_norm", "precision": "precision=bf16"}
    assert MODEL_AXES.isdisjoint({"tensor", "zero", "schedule"})
    assert not any(each.startswith("parallelism.") for each in model_overrides(draw))
    assert {"model.norm=rms_norm", "precision=bf16"} <= set(model_overrides(draw))
    assert {"model.norm=rms_norm", "precision=fp32"} <= set(model_overrides(draw, "fp32"))
    assert row_name(draw) == "tp2-pp1-dp1-zero0-acc1-bf16-norm_rms_norm"
