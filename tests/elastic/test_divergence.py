"""A run whose copies differ names the node, and goes back to before it; its curve is that of a run without it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed.cells.run import Ranks
from run_files import differing, read_metrics

import gptlite.satellites.monitor.replicas
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.satellites.elastic.divergence import FILE, RestoringCheck
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.satellites.monitor.replicas import check_replicas
from gptlite.start.pretrain import pretrain
from gptlite.trainer.signals import StopSignal

THIS = "elastic.test_divergence"
NAME = "layers.1.attn_norm.weight"


def train_with_flips(overrides: list[str], flips: list[tuple[int, int]], shelf: bool = False) -> tuple[int, int | None]:
    """Trains. Before the first check after a step, rank flips one bit of its copy, for each (step, rank) once."""
    left, rank = list(flips), int(os.environ["RANK"])

    def check(parameters: Any, tied: list[str], mesh: Any, step: int, node: str | None = None) -> None:
        named = list(parameters)
        for flip in [flip for flip in left if flip[0] == step][:1]:
            left.remove(flip)
            if flip[1] == mesh.rank:
                local = dict(named)[NAME].detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                local.view(-1)[:1].view(torch.int32)[0] ^= 1 << 20
        check_replicas(named, tied, mesh, step, node)

    gptlite.satellites.monitor.replicas.check_replicas = check
    memory, stop = Shelf.new(f"n{rank}", os.getpid(), 0) if shelf else None, StopSignal()
    try:
        return pretrain(load(overrides), None, stop, shelf=memory).exit_code, stop.received
    finally:
        gptlite.satellites.monitor.replicas.check_replicas = check_replicas
        if memory:
            memory.close()


@pytest.fixture
def options(tiny: list[str]) -> list[str]:
    more = ["trainer.replica_check_interval=2", "trainer.on_divergence=restore", "checkpoint.interval=3"]
    return [
        *tiny,
        *more,
        "data.global_batch_size=12",
        "data.micro_batch_size=1",
        "checkpoint.keep=0",
        "trainer.log_interval=1",
    ]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [
    (2, ["parallelism.zero=0"]), (3, ["parallelism.zero=0"]), (4, ["parallelism.dp_replicate=2", "parallelism.zero=3"])
])  # fmt: skip
def test_a_flipped_bit_leaves_no_trace(options: list[str], tmp_path: Path, world: int, layout: list[str]) -> None:
    with Ranks(world) as ranks:

        def train(name: str, *flips: tuple[int, int]) -> list[tuple[int, int | None]]:
            overrides = [*options, *layout, f"run.dir={tmp_path / name}"]
            return ranks.run(f"{THIS}:train_with_flips", overrides, list(flips), timeout=300)

        assert train("whole") == [(0, None)] * world
        assert train("flipped", (4, world - 1), (6, 0)) == [(0, None)] * world
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    assert losses(whole) == losses(flipped)  # bit for bit
    assert differing(whole, flipped, 8) == []
    log, start = (flipped / "train.log").read_text(), f"parameter {NAME} differs between dp_replicate ranks"
    assert log.count(start) == 2
    assert "after step 4; " in log
    assert "going back to step-00000003 (1 of at most 3 times)" in log  # checks pass before a save
    assert "going back to step-00000003 (2 of at most 3 times)" in log
    assert "Traceback" not in log
    assert json.loads((flipped / FILE).read_text())["returns"] == 2
    assert json.loads((flipped / "result.json").read_text())["status"] == "done"
    if world == 3:
        assert "(world ranks 0, 1 and 2) after step 4; wrong: rank 2 on " in log
    else:
        assert "without a majority, one of them is wrong: rank " in log


@pytest.mark.slow
def test_a_run_goes_back_three_times(options: list[str], tmp_path: Path) -> None:
    overrides, flips = [*options, f"run.dir={tmp_path}", "parallelism.zero=0"], [(4, 1), (4, 0), (4, 1), (4, 0)]
    with Ranks(2) as ranks:
        assert ranks.run(f"{THIS}:train_with_flips", overrides, flips, timeout=300) == [(1, None)] * 2
    log = (tmp_path / "train.log").read_text()
    assert "going back to step-00000003 (3 of at most 3 times)" in log
    assert "the run has already gone back 3 times. Nothing was saved" in log
    assert json.loads((tmp_path / "result.json").read_text())["status"].endswith("already gone back 3 times")


def test_checkpoints_of_later_steps_than_the_last_good_check_are_renamed(tmp_path: Path) -> None:
    """Such as one that a loss spike has postponed."""
    log: list[str] = []
    config = load(["data=synthetic", "trainer.on_divergence=restore", "trainer.replica_check_interval=2"])
    folder: Any = SimpleNamespace(path=tmp_path, config=config, log=log.append)
    check = RestoringCheck(folder, step=2)
    for step in (3, 5, 7):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    again, text, _ = check._decide(())
    assert (again, text) == (False, "no checkpoint is of step 2, the last that was checked, or before")
    assert not (tmp_path / FILE).exists()
    check.passed(SimpleNamespace(step=6))  # type: ignore[arg-type]
    decided = check._decide(("b",)), check._decide(("b",)), check._decide(("c",))
    texts = [f"going back to step-00000005 ({number} of at most 3 times)" for number in (1, 2, 3)]
    assert decided == ((True, texts[0], ""), (True, texts[1], "b"), (True, texts[2], ""))
    assert check._decide(("c",))[:2] == (False, "the run has already gone back 3 times")
    names = sorted(path.name[:24] for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000005", "superseded-step-00000007"]
    assert len(log) == 1
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000005\n"


@pytest.mark.slow
def test_a_node_that_is_wrong_twice_leaves_an_elastic_run(options: list[str], tmp_path: Path) -> None:
    overrides = [*options, f"run.dir={tmp_path}", "parallelism.zero=0", "parallelism.elastic=true"]
    with Ranks(3) as ranks:
        results = ranks.run(f"{THIS}:train_with_flips", overrides, [(4, 1), (6, 1)], True, timeout=300)
    assert results == [(143, 15)] * 3
    log = (tmp_path / "train.log").read_text()
    assert "wrong: rank 1 on n1, by majority" in log
    assert "node n1 has had wrong copies twice; it leaves the run now" in log
    assert json.loads((tmp_path / FILE).read_text()) == {"returns": 2, "nodes": {"n1": 2}}


def test_the_key_is_checked_before_any_rank_starts(run: Callable) -> None:
    with pytest.raises(ConfigError, match=r"^trainer.on_divergence=retry must be stop or restore$"):
        load(["data=synthetic", "trainer.on_divergence=retry"])
    with pytest.raises(ConfigError, match=r"^trainer.on_divergence=restore needs checks that copies are equal; set "):
        load(["data=synthetic", "trainer.on_divergence=restore"])
