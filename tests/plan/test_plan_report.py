"""A report says how sure it is: which layouts are equal, what memory is to spare; and it fits 80 columns."""

import json
import re
import time
from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from gptlite.commands.plan import planned_config
from gptlite.config import load
from gptlite.satellites.plan.capacity import rank_memory
from gptlite.satellites.plan.pictures import EQUAL, MEMORY, TIME
from gptlite.satellites.plan.planning import make_plan, space_of
from gptlite.satellites.plan.report import report, unmeasured_words, write
from gptlite.satellites.plan.search import ERROR, distinct, equals, workloads

GIVEN = ["model=gpt3-xl", "data=synthetic", "data.global_batch_size=32", "parallelism.sequence=false"]
GIVEN = [*GIVEN, "cluster=dgx-h100", "cluster.devices_per_node=4"]


def planned(*more):
    return make_plan(planned_config([*GIVEN, *more]), log=lambda text: None)


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture(scope="module")
def tight(plan):
    """The plan of devices whose memory the pick of the other plan just fits."""
    return planned(f"cluster.memory_gib={1.02 * plan.best.prediction.memory.total / 2**30 + 2}")


def shown(plan, top=30):
    return report(plan, top).split("train the best with")[0].splitlines()


def words_of(plan):
    return " ".join(" ".join(shown(plan)).split())


def test_a_report_fits_80_columns(plan):
    assert max(map(len, shown(plan))) == 80


def test_a_plan_for_a_cluster_without_measurements_says_so(plan):
    words = "planned from data sheets, not measured with gptlite"
    low, high = plan.cluster.published
    more = f"; published runs of other code took {low:g} to {high:g} of their planned time"
    assert words + more == unmeasured_words(plan.cluster)
    assert words + more in words_of(plan)
    cluster = replace(plan.cluster, published=[])
    assert unmeasured_words(cluster) == words
    for changed in ({"calibrated": "today"}, {"measured": "today"}, {"name": "local"}):
        assert unmeasured_words(replace(cluster, **changed)) == ""


def test_a_plan_for_a_measured_cluster_says_on_what(plan):
    measured = words_of(planned("cluster=h200"))
    assert "data sheets" not in measured
    assert "GPUs of 141 GiB, measured 2026-11-27, one H200" in measured


def test_a_plan_for_nodes_that_fail_has_checkpoint_intervals(plan):
    assert "failures" not in words_of(plan)
    words = words_of(planned("cluster.mtbf_hours=500", "cluster.nodes=2"))
    assert re.search(r"failures one of 2 nodes every 10d10h, planned with a restart in \d+ s from disk", words)
    assert re.search(r"checkpoint.interval=\d+: \S+ s a save, goodput 9\d\.\d%", words)
    assert re.search(r"checkpoint.memory_interval=\d+ checkpoint.replicas=1 checkpoint.interval=\d+: ", words)


def test_the_reason_of_a_refused_layout_has_no_advice(plan):
    assert any("; " in reason for reason in plan.found.examples.values())
    for kind, reason in plan.found.examples.items():
        refused = f"{kind}, e.g. {reason.partition('; ')[0]}"
        assert refused in words_of(plan)
        assert f"{refused};" not in words_of(plan)


def test_equal_layouts_are_marked_and_counted(plan):
    rows = [line.split() for line in shown(plan) if line[:2].strip().isdigit()]
    marked = [row[1] == "=" for row in rows]
    alike, kinds = equals(plan.found), distinct(plan.found, 30)
    last = plan.best.prediction.step_seconds * (1 + ERROR)
    assert marked == [each.prediction.step_seconds <= last for each in kinds]
    assert 0 < sum(marked) < len(marked)
    words = words_of(plan)
    assert f"{len(alike)} layouts, of {sum(marked)} combinations of degrees and ZeRO stage, are equal within" in words
    assert f"error of {ERROR:.0%}; the first is the fastest predicted; = marks them" in words


def test_a_single_layout_has_no_equals():
    alone = planned("parallelism.data=4", "parallelism.zero=1", "data.micro_batch_size=1",
                    "parallelism.activation_checkpointing=none", "parallelism.dp_replicate=1")  # fmt: skip
    assert "none: all others are slower by more than the planner's error of 8%" in " ".join(
        " ".join(shown(alone)).split()
    )


@pytest.mark.slow
def test_memory_to_spare_is_that_of_the_pick(plan, tight):
    total, limit = plan.best.prediction.memory.total, rank_memory(plan.cluster, 4)
    words = words_of(plan)
    there = f"{total / 2**30:.1f} GiB predicted of {limit / 2**30:.1f} on the fullest rank"
    assert f"{there}, {1 - total / limit:.1%} to spare" in words
    assert ("prediction's error" in words) == (total > 0.95 * limit)
    assert "to spare: less than the prediction's error of 5%" in words_of(tight)


def test_a_tight_pick_is_joined_by_an_equal_one_with_memory_to_spare(plan, tight):
    total = plan.best.prediction.memory.total
    least = min(each.prediction.memory.total for each in equals(plan.found))
    assert least < 0.9 * total
    assert "or, as fast within the error" not in report(plan, 5)
    words = report(tight, 5)
    first, second = (line for line in words.splitlines() if "train.py" in line)
    assert first != second
    spare = int(re.search(r"or, as fast within the error and with (\d+)% of the memory to spare", words)[1])
    assert 5 <= spare <= 100 * (1 - least / (1.02 * total)) + 1


def test_the_files_have_the_uncertainty_too(plan, tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *how, **more: figures.append(self) or save(self, *how, **more))
    files = write(plan, tmp_path, 5)
    assert [file.name for file in files] == ["plan.png", "plan.json"]  # the pick has no pipeline
    shade, order = to_rgba(EQUAL), {True: [], False: []}
    for patch in figures[0].axes[0].patches:
        order[patch.get_facecolor() == shade].append(patch.zorder)
    assert max(order[True]) < min(order[False])  # behind the bars
    whole = json.loads(files[-1].read_text())
    assert whole["error"] == ERROR
    assert whole["equal"] == len(equals(plan.found))
    assert whole["memory_limit"] == rank_memory(plan.cluster, 4)
    assert whole["layouts"][0]["equal"] is True


def test_a_picks_pipeline_is_drawn(tmp_path):
    piped = planned("parallelism.pipeline=2", "parallelism.tensor=1", "parallelism.schedule=1f1b", "parallelism.zero=1",
                    "parallelism.activation_checkpointing=none", "data.micro_batch_size=1")  # fmt: skip
    assert [file.name for file in write(piped, tmp_path, 1)] == ["plan.png", "timeline.png", "plan.json"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_eta_of_a_search_leaves_out_the_time_before_it(monkeypatch):
    lines, now = [], 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    config = load(GIVEN)
    space = space_of(config, config.cluster, frozenset({"micro_batch_size"}))
    monkeypatch.setattr("gptlite.satellites.plan.search.layouts", lambda *_: [space.work.parallelism] * 4)
    for number, _ in enumerate(workloads(space, config.cluster, 4, lines.append)):
        now = (60.0, 66.0, 69.0, 72.0)[number]
    assert lines == [
        "plan for 4 ranks: 3 of 4 combinations of degrees and options, ETA 3s",
        "plan for 4 ranks: checking the memory of the fastest layouts",
    ]


def test_a_command_for_several_nodes_can_be_pasted():
    last = report(planned("cluster.nodes=2", "parallelism.tensor=1", "data.micro_batch_size=1"), 3).splitlines()[-1]
    assert last.startswith("torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 ")


def test_a_color_means_one_thing_in_a_picture():
    assert {name for name in TIME if name in MEMORY} == {"optimizer"}
    assert TIME["optimizer"] == MEMORY["optimizer"]
    assert len({*TIME.values(), *MEMORY.values()}) == len(TIME) + len(MEMORY) - 1
