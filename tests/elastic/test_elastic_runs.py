"""A run that goes on with fewer ranks, and with more again, has the losses and the samples of the uninterrupted one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed.cells.run import GrowingRanks
from distributed.test_continue import BASE, EXPERTS, Trained
from marking import marked
from run_files import read_metrics

from gptlite.config import load
from gptlite.satellites.elastic.degree import largest, ranks_per_copy

# 10 samples a batch: three data ranks have four each at most, and so two fillers.
SHORT = "trainer.max_steps=12 schedule.warmup_steps=11 trainer.eval_interval=6".split()
OVERRIDES = [*BASE, *SHORT, "data.global_batch_size=10", "parallelism.data=elastic"]
PIECES = ((4, 3), (3, 6), (2, 9), (4, None))  # copies of the model that the ranks at hand would allow, stop_step


@dataclass(frozen=True)
class Case:
    """Overrides of a run, and how far its losses may be from those of the uninterrupted run, relative."""

    words: str
    close: float = 1e-6
    more: Sequence[str] = ()

    @property
    def id(self) -> str:
        words = [*self.words.split(), *(each.split(".")[-1] for each in self.more)]
        return "-".join(re.sub(r"\W+", "", each) for each in words)

    @property
    def overrides(self) -> list[str]:
        layout = [f"parallelism.{each}" for each in self.words.split()]
        return [*OVERRIDES, *layout, *self.more]


MOE = Case("expert=2 zero=3", more=(*EXPERTS, "model.moe.sequence_loss=0.01"))
CASES = [
    Case("zero=2"),
    *(Case(f"zero={zero}") for zero in (0, 1, 3)),
    Case("zero=1", more=("data.micro_batch_size=2",)),
    Case("tensor=2 zero=3"),
    Case("pipeline=2 zero=1", more=("data.micro_batch_size=1",)),
    Case("tensor=2 sequence=true zero=2", more=("data.packing=documents",)),
    MOE,
    Case("expert=1 zero=1", more=(*EXPERTS, "model.moe.sequence_loss=0.01")),
    Case("zero=2", more=("optimizer=muon", "optimizer.lr=3e-4")),
    Case("zero=1", more=("data.batch_ramp=[4,2,60]",)),
    Case("zero=1", more=("trainer.noise_scale=true", "data.micro_batch_size=1")),
    # The losses of fp16 have three digits, and so have its gradients; the loss scale is the same in every step.
    Case("zero=2", close=2e-5, more=("precision=fp16",)),
    Case("zero=2", close=0, more=("parallelism.deterministic=true",)),
    # What compression loses depends on the ranks.
    Case("zero=1", close=2e-5, more=("parallelism.compression=int8",)),
    Case("zero=3", close=2e-4, more=("parallelism.zeropp.weights=int8", "parallelism.zeropp.node_size=1")),
    Case(
        "zero=0",
        close=5e-2,
        more=("optimizer=onebit_adam", "optimizer.lr=3e-4", "optimizer.freeze_step=4", "schedule.warmup_steps=4"),
    ),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GrowingRanks]:
    ranks = GrowingRanks((4, 8))
    yield ranks
    ranks.close()


def train(ranks: GrowingRanks, world: int, case: Case, folder: Path, *more: str) -> list[Trained]:
    config = load([*case.overrides, f"run.dir={folder}", *more])
    world = largest(config, world * ranks_per_copy(config))
    trained = ranks.run(world, "distributed.test_continue:train", config, None, timeout=250)
    assert [each.code for each in trained] == [0] * world
    return trained


def samples(trained: list[Trained]) -> list[tuple[int, str]]:
    """Number and text of each sample in the order of the batches, without fillers."""
    parts = {each.data_rank: each.fed for each in trained}
    assert all(parts[each.data_rank] == each.fed for each in trained)  # of ranks that share samples
    order = sorted((fed.consumed, fed.micro, rank, fed) for rank, each in parts.items() for fed in each)
    pairs = [pair for *_, fed in order for pair in zip(fed.ids, fed.texts, strict=True)]
    return [(number, text) for number, text in pairs if number >= 0]


def steps(folder: Path) -> dict[int, dict]:
    return {row["step"]: row for row in read_metrics(folder) if "loss" in row}


def order(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "data_order.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", marked(CASES, 0, len(CASES), lambda case: case.id))
def test_a_run_on_changing_ranks_is_the_uninterrupted_run(case: Case, ranks: GrowingRanks, tmp_path: Path):
    whole = samples(train(ranks, 4, case, tmp_path / "whole"))
    assert [number for number, _ in whole] == list(range(len(whole)))
    cut = []
    for world, stop in PIECES:
        more = [f"trainer.stop_step={stop or 'null'}"]
        cut += samples(train(ranks, world, case, tmp_path / "cut", *more))
    assert cut == whole
    ours, theirs = steps(tmp_path / "cut"), steps(tmp_path / "whole")
    assert list(ours) == list(theirs) == list(range(1, 13))
    for step, row in theirs.items():
        for key, bound in {"loss": case.close, "router_loss": case.close, "grad_norm": 100 * case.close}.items():
            if key in row:
                assert ours[step][key] == pytest.approx(row[key], rel=bound, abs=0), (step, key)
        for key in ("tokens", "lr", "loss_scale", "expert_imbalance"):
            assert ours[step].get(key) == row.get(key), (step, key)
    assert order(tmp_path / "cut")[0] == order(tmp_path / "whole")[0]
    log = (tmp_path / "cut" / "train.log").read_text()
    assert "resuming with a change: layout: " in log
    assert "resuming with parallelism" not in log
