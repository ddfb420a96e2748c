"""kill -9 at seeded points: every checkpoint stays loadable, at most one interval is lost, no number changes."""

import platform
import signal
from collections import Counter
from pathlib import Path
from shutil import copytree

import pytest
from checkpoint.destruction.campaign import Campaign, Lives, differing
from checkpoint.destruction.forks import shared_server
from checkpoint.destruction.lives import TINY, read_journal, wait_for
from checkpoint.destruction.points import STAGES
from models.resnet import RUN
from run_files import read_metrics

from gptlite.checkpoint.store import step_folders, step_of

RESNET = [*RUN, "plugins=[examples.resnet]", "trainer.max_steps=100000", "trainer.eval_interval=0"]
MODES = {"sync": "checkpoint.async_save=false", "async": "checkpoint.async_save=true"}
STAGED = [("async", ("data", "manifest", "after rename")), pytest.param("sync", STAGES, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("mode", "stages"), STAGED)
def test_killed_in_the_stages_of_a_save(tmp_path, mode, stages):
    campaign = Campaign(shared_server(), tmp_path, [MODES[mode]], seed=0, interval=2)
    campaign.probe()
    for stage in stages:
        campaign.kill_at(stage)
    campaign.kill_by_time()
    assert campaign.hits == Counter(dict.fromkeys((*stages, "time"), 1))
    assert campaign.differing() == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", MODES)
def test_killed_22_times(tmp_path, mode, seed):
    campaign = Campaign(shared_server(), tmp_path, [MODES[mode]], seed=seed, interval=1 + seed % 3)
    campaign.probe()
    for number in range(11):
        campaign.kill_at(STAGES[(number + seed) % len(STAGES)])
        campaign.kill_by_time()
    assert sum(campaign.hits.values()) == 22
    assert all(campaign.hits[stage] for stage in STAGES)
    assert campaign.differing() == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_killed_10_times(tmp_path, mode, seed):
    overrides = [MODES[mode], "parallelism.data=2", f"parallelism.zero={seed % 4}"]
    campaign = Campaign(shared_server(), tmp_path, overrides, seed=seed, interval=1 + seed % 2, world=2)
    campaign.probe()
    for number in range(5):
        stage = STAGES[(number + 2 * seed) % len(STAGES)]
        campaign.kill_at(stage, rank=number % 2 if stage == "data" else 0)
        campaign.kill_by_time()
    assert sum(campaign.hits.values()) == 10
    assert campaign.differing() == []


BASES = {"gpt": TINY, "batch norm": [*RESNET, "model.norm=batch"], "group norm": [*RESNET, "model.norm=group"]}
ELSEWHERE = {"alone": 1, "pipeline": 2}  # number of ranks


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("base", BASES)
def test_two_ranks_killed_go_on_in_any_layout(tmp_path, base, zero):
    """To the bit in the same layout; elsewhere within the bounds of parity."""
    micro = 2 if base == "gpt" else 8  # over all data ranks, as the statistics of batch norm depend on it
    overrides = ["parallelism.data=2", f"parallelism.zero={zero}", f"data.micro_batch_size={micro // 2}"]
    campaign = Campaign(shared_server(), tmp_path, overrides, seed=zero, interval=2, world=2, base=BASES[base])
    campaign.probe()
    for stage, rank in (("step", 1), ("data", 1), ("manifest", 0)):
        campaign.kill_at(stage, rank)
    copies = {name: copytree(campaign.run, tmp_path / name) for name in ELSEWHERE}
    last = campaign.finish()
    whole = campaign.uninterrupted(step_of(last) or 0)
    assert differing(last, whole) == []
    for name, campaign.world in ELSEWHERE.items():
        layout = f"parallelism.pipeline={campaign.world}", "parallelism.data=1", f"data.micro_batch_size={micro}"
        campaign.complete(f"run.dir={copies[name]}", f"trainer.max_steps={step_of(last)}", *layout)
        assert curve(copies[name]) == pytest.approx(curve(tmp_path / "whole"), rel=2e-4)


def curve(run: Path) -> list[float]:
    """The loss and the gradient norm of each step, as it was last computed."""
    rows = {row["step"]: row for row in read_metrics(run) if "loss" in row}
    return [rows[step][key] for step in sorted(rows) for key in ("loss", "grad_norm")]


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(tmp_path):
    lives, overrides = Lives(shared_server(), tmp_path), [*TINY, f"run.dir={tmp_path / 'run'}", "checkpoint.interval=1"]
    (first,) = lives.begin(overrides)
    wait_for(journal := lives.journal(), "saved 1")
    assert lives.live(overrides) == [2]
    (line,) = [line for line in lives.said().splitlines() if line.startswith("error: ")]
    assert f"run.dir={tmp_path / 'run'}" in line
    assert str(first.pid) in line
    assert platform.node() in line
    assert "Traceback" not in lives.said()
    reached = len(read_journal(journal))
    first.signal(signal.SIGTERM)
    assert first.wait() == 143
    assert len(read_journal(journal)) > reached
    (third,) = lives.begin(overrides)
    wait_for(lives.journal(), "saved")
    third.kill()
    assert third.wait() == -9
    (newest, *_) = step_folders(tmp_path / "run" / "checkpoints")
    assert lives.live([*overrides, f"trainer.max_steps={(step_of(newest) or 0) + 1}"]) == [0]
