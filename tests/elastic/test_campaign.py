"""The campaign of losses: what it draws, what its check finds, and short campaigns."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from elastic.campaign import run as command
from elastic.campaign.check import Curve, doubled, missing, order, source, step_rows, wrong
from elastic.campaign.draw import COMMON, KINDS, LAYOUTS, draw
from elastic.campaign.report import plot, read, table

STEPS, SAMPLES, LENGTH = 40, 24, 16
AS_ROOT = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and iproute2"
)


def rows(samples: dict[int, list[int]], start: int = 1) -> list[dict]:
    """Rows of steps that train these samples: the loss depends on them, and on all samples before."""
    written, state, count = [], 0.0, 0
    for step, numbers in samples.items():
        loss = 4 + 1e-3 * (sum(numbers) % 97) - state
        state += 1e-4 * sum(numbers) / (1 + max(numbers))
        count += len(numbers)
        written.append({"step": step, "loss": loss, "tokens": count * LENGTH, "start": start})
    return written


def batches() -> dict[int, list[int]]:
    return {step: list(range((step - 1) * SAMPLES, step * SAMPLES)) for step in range(1, STEPS + 1)}


@pytest.fixture
def curve() -> Curve:
    whole = rows(batches())
    return Curve({row["step"]: row["loss"] for row in whole}, {row["step"]: row["tokens"] for row in whole})


def test_the_uninterrupted_rows_are_right(curve):
    assert wrong(rows(batches()), curve, 1e-6) == []
    assert doubled(rows(batches())) == missing(rows(batches()), STEPS) == []


def test_a_restart_that_repeats_steps_is_right(curve):
    whole = rows(batches())
    restarted = whole[:17] + [row | {"start": 2} for row in whole[14:]]
    assert wrong(restarted, curve, 1e-6) == doubled(restarted) == missing(restarted, STEPS) == []


def test_a_start_from_a_newer_checkpoint_of_a_node_that_came_back_is_right(curve):
    whole = rows(batches())
    restarted = [*whole[:17], *(row | {"start": 2} for row in whole[:3]), *(row | {"start": 3} for row in whole[15:])]
    assert wrong(restarted, curve, 1e-6) == doubled(restarted) == []


def test_a_skipped_sample_is_caught(curve):
    fed = batches()
    for step in range(20, STEPS + 1):  # from step 20 on, every batch is one sample further
        fed[step] = [number + 1 for number in fed[step]]
    found = wrong(rows(fed), curve, 1e-6)
    assert found[0].startswith("step 20: loss")
    assert len(found) == STEPS - 19


def test_a_sample_that_a_batch_lacks_is_caught(curve):
    fed = batches() | {20: batches()[20][1:]}
    assert f"step 20: {20 * SAMPLES * LENGTH - LENGTH} tokens instead of {20 * SAMPLES * LENGTH}" in wrong(
        rows(fed), curve, 1e-6
    )


def test_a_doubled_sample_is_caught(curve):
    fed = batches() | {20: [batches()[20][0], *batches()[20][:-1]]}
    assert wrong(rows(fed), curve, 1e-6)[0].startswith("step 20: loss")


def test_a_step_that_is_trained_twice_is_caught(curve):
    whole = rows(batches())
    again = [*whole[:20], whole[19], *whole[20:]]  # as if the update of step 20 had been kept twice
    assert doubled(again) == ["step 20 follows step 20 without a restart: samples doubled"]


def test_a_step_that_is_left_out_is_caught(curve):
    whole = rows(batches())
    left = whole[:19] + [row | {"start": 2} for row in whole[20:]]
    assert wrong(left, curve, 1e-6) == ["step 21 follows step 19: samples lost"]
    assert missing(left, STEPS) == ["no row of steps [20]"]


@pytest.mark.parametrize(("factor", "right"), [(1 + 1e-5, False), (1 - 1e-5, False), (1 + 5e-7, True)])
def test_a_loss_beyond_the_tolerance_is_caught(curve, factor, right):
    whole = rows(batches())
    whole[30]["loss"] *= factor
    assert (wrong(whole, curve, 1e-6) == []) == right


def test_a_loss_that_is_not_a_number_is_caught(curve):
    whole = rows(batches())
    whole[30]["loss"] = float("nan")
    assert wrong(whole, curve, 1e-6)[0].startswith("step 31: loss nan")


def test_other_rules_of_samples_are_caught(tmp_path):
    for name, batch in (("one", 24), ("same", 24), ("other", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data_order.jsonl").write_text(json.dumps({"step": 0, "global_batch_size": batch}) + "\n")
    assert order(tmp_path / "same", tmp_path / "one") == []
    assert len(order(tmp_path / "other", tmp_path / "one")) == 1


def test_a_line_that_a_kill_cut_short_is_counted():
    text = '{"step": 1, "loss": 2.0, "tokens": 3}\n{"step": 2, "lo\n{"step": 2, "val_loss": 1.0}\n'
    assert step_rows(text) == ([{"step": 1, "loss": 2.0, "tokens": 3}], 1)


def test_where_each_start_took_its_state_from():
    end = f"{'=' * 80}\nstep  1/20  loss  4.0\n"
    log = f"starting\n== gptlite ==\n{end}"
    log += f"resuming from /runs/one/checkpoints/step-00000012\n== gptlite ==\n{end}"
    log += f"node 1 lost at step 14\nrestored step 10 from memory of nodes 0 and 2 in 0.1 s\n== gptlite ==\n{end}"
    log += f"== gptlite ==\nrestored from disk: step 10 (no part of rank 1)\n{end}"
    assert [source(log, start) for start in (1, 2, 3, 4)] == ["new", "disk", "memory", "disk"]


def test_a_plan_depends_on_the_seed_and_the_number_alone():
    assert draw(1, 5) == draw(1, 5)
    assert len({repr(draw(seed, number)) for seed in range(3) for number in range(30)}) == 90


def test_plans_draw_every_kind_layout_and_number_of_nodes():
    plans = [draw(1, number) for number in range(120)]
    losses = [loss for plan in plans for loss in plan.losses]
    counts = {kind: sum(loss.kind == kind for loss in losses) for kind in KINDS}
    assert min(counts.values()) > len(losses) / len(KINDS) / 2
    assert {plan.layout.name for plan in plans} == {layout.name for layout in LAYOUTS}
    assert {plan.nodes for plan in plans} == {2, 3, 4, 5, 6}


def test_a_plan_leaves_nodes_that_can_train():
    for number in range(300):
        plan = draw(2, number)
        for loss in plan.losses:
            assert max(loss.nodes) < plan.nodes
            lost = {node for node, way in zip(loss.nodes, loss.ways, strict=False) if way != "rank"}
            assert plan.nodes - len(lost) >= plan.layout.multiple, loss
            assert loss.kind not in ("two", "restore") or len(set(loss.nodes)) == 2


def test_the_reference_has_the_data_and_the_optimizer_of_its_runs():
    for layout in LAYOUTS:
        assert set(layout.alone("x", 9)) - set(layout.command("x", 9)) == set()
        assert set(COMMON) <= set(layout.alone("x", 9))


def test_the_table_counts_and_names_what_is_wrong(tmp_path):
    losses = [
        {"kind": kind, "layout": "data", "run": 0, "ok": True, "seconds": 2.0 + n, "detected": 0.5, "repeated": n % 3}
        for n, kind in enumerate(itertools.islice(itertools.cycle(KINDS), 18))
    ]
    losses[0] |= {"ok": False, "reason": "step 3: samples lost"}
    runs = [{"layout": "data", "run": 0, "ok": True, "reason": "", "wall": 60.0}]
    text = table(losses, runs)
    assert "| kill -9 of a rank | 2 | 1 | 0 | 0.5 | 6.5 | 11.0 |" in text
    assert "| all | 18 | 17 |" in text
    assert "step 3: samples lost" in text
    plot(losses, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000


def campaign(out: Path, **arguments) -> None:
    """Run a campaign, and assert that every loss and every run of it is right."""
    code = command.main(command.Arguments(out=str(out), **arguments))
    losses, runs = read(out / "losses.jsonl"), read(out / "runs.jsonl")
    assert [row for row in losses + runs if not row["ok"]] == []
    assert code == 0
    assert len(losses) == arguments["losses"]


@AS_ROOT
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_losses_on_two_nodes(tmp_path):
    campaign(tmp_path, losses=2, seed=2, layout="zero2", kinds="rank,agent", each=2, steps=220)


@AS_ROOT
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_losses(tmp_path):
    campaign(tmp_path, losses=20, seed=3, each=5)
