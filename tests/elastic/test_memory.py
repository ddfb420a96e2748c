"""Checkpoints in memory: restored bit for bit, on any layout, from the parts that survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.cells.compare import same_bits
from distributed.cells.reshard import COUNTERS, drawn
from distributed.cells.reshard_pairs import EXPERTS, SINGLE, SMALL, Layout, Pair
from distributed.cells.run import GrowingRanks
from marking import marked
from run_files import checkpoint, differing, read_metrics, step_folder

from elastic.cells import NONE, Damage
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import Config, load

CELLS = "elastic.cells:"
MEMORY = ["checkpoint.memory_interval=2", "checkpoint.replicas=1"]
FOUR = Pair(Layout(data=4, zero=3), Layout(data=4, zero=3))
THREE = Pair(Layout(data=4, zero=3), Layout(data=3, zero=1))
TWO = Pair(Layout(data=3, zero=1), Layout(tensor=2, data=2, zero=2))
MUON = ["optimizer=muon"]
HALF = ["precision=bf16", "precision.master_weights=false"]
FILES = ["parallelism.offload=nvme", "parallelism.offload_path=FOLDER"]
RUNS = {
    "zero2": ["parallelism.zero=2"],
    "onebit": ["optimizer=onebit_adam", "optimizer.freeze_step=3"],  # it has errors from step 4 on
    "powersgd": ["parallelism.compression=powersgd", "parallelism.compression_rank=2"],
    "fp16": ["precision=fp16", "parallelism.tensor=2"],
}


@pytest.fixture(scope="module")
def growing() -> Iterator[GrowingRanks]:
    ranks = GrowingRanks((4,))
    yield ranks
    ranks.close()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def of(pair: Pair, layout: Layout, *more: str) -> Config:
        return load([*pair.overrides(layout), f"run.dir={tmp_path}", *MEMORY, *more])

    return of


PAIRS = [THREE, TWO, EXPERTS[0], *SMALL[:5], Pair(SINGLE, SINGLE), Pair(Layout(tensor=2), SINGLE, "values")]


@pytest.mark.parametrize("pair", marked(PAIRS, 2, len(PAIRS) - 2, lambda pair: pair.id))
def test_any_layout_restores_what_any_other_has_kept(
    pair: Pair, growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    source, target = pair.source, pair.target
    growing.run(source.world, CELLS + "keep", config(pair, source), str(tmp_path), [4, 6])
    first, *others = growing.run(target.world, CELLS + "recall", config(pair, target), str(tmp_path))
    assert {each.step for each in (first, *others)} == {6}
    assert first.wrong == []
    assert any("restored step 6 from memory of node" in line for line in first.log)


@pytest.mark.slow
@pytest.mark.parametrize("more", [MUON, HALF, FILES, ["parallelism.offload=cpu"]], ids=["muon", "bf16", "files", "cpu"])
def test_every_kind_of_state_is_restored(
    more: list[str], growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    source, target = Layout(data=4, zero=3), Layout(tensor=2, data=2, zero=1)
    pair, more = Pair(source, target), [each.replace("FOLDER", str(tmp_path)) for each in more]
    growing.run(4, CELLS + "keep", config(pair, source, *more), str(tmp_path), [4])
    first, *_ = growing.run(4, CELLS + "recall", config(pair, target, *more), str(tmp_path))
    assert (first.step, first.wrong) == (4, [])


def test_a_lost_node_is_replaced_by_its_partner_and_two_neighbours_are_not(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source)
    every = growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    for rank, each in enumerate(every):  # both versions of its own part, and of the node before it
        assert each == sorted((step, part) for step in (4, 6) for part in (rank, (rank - 1) % 4))

    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(lost=[1]))
    assert (first.step, first.wrong) == (6, [])

    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(lost=[2]))  # rank 1 has not kept its own
    assert first.step is None
    assert first.log[-1] == "restored from nothing: no step is on disk (memory lacks the parts of rank 1 at step 6)"


def test_a_damaged_part_is_named_and_another_copy_or_the_step_before_is_used(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source)
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    named = "memory of node n{0}, rank {0}: rank 1's part of step 6 is damaged (its hash differs)"

    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(flipped=[1]))
    assert (first.step, first.wrong) == (6, [])
    assert named.format(1) in first.log

    damage = Damage(flipped=[2], places=[1])
    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), damage)
    assert (first.step, first.wrong) == (4, [])
    assert {named.format(1), named.format(2)} <= set(first.log)


def test_a_rank_killed_during_a_save_leaves_the_step_before(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source)
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(torn=[0, 1], places=[0, 1]))
    assert (first.step, first.wrong) == (4, [])


def test_a_step_that_the_run_has_not_reached_again_is_not_restored(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source)
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    steps = [growing.run(4, CELLS + "recall", run, str(tmp_path), NONE, reached)[0].step for reached in (6, 5, 3)]
    assert steps == [6, 4, None]


def test_later_steps_are_dropped(growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path):
    run = config(FOUR, FOUR.source)
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    growing.run(4, CELLS + "forget", run, str(tmp_path), 5)
    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path))
    assert (first.step, first.wrong) == (4, [])


def test_spare_ranks_hand_over_what_only_they_hold(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source, "checkpoint.replicas=0")
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    after = growing.run(4, CELLS + "give", run, str(tmp_path), 2)
    assert after == [[(s, p) for s in (4, 6) for p in parts] for parts in ([0, 2], [1, 3], [2], [3])]
    pair = Pair(FOUR.source, Layout(tensor=2))
    first, *_ = growing.run(2, CELLS + "recall", config(pair, pair.target, "checkpoint.replicas=0"), str(tmp_path))
    assert (first.step, first.wrong) == (6, [])


def test_nodes_of_several_ranks_keep_copies_on_other_nodes(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run = config(FOUR, FOUR.source)
    held = growing.run(4, CELLS + "keep", run, str(tmp_path), [4], ["a", "a", "a", "b"])
    assert [sorted({part for _, part in each}) for each in held] == [[0, 3], [1], [2], [0, 1, 2, 3]]
    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(lost=[0, 1, 2]))
    assert (first.step, first.wrong) == (4, [])


def test_too_few_ranks_write_what_is_in_memory_to_disk(
    growing: GrowingRanks, config: Callable[..., Config], tmp_path: Path
):
    run, layout = config(FOUR, FOUR.source), "data 4 (zero 3)"
    growing.run(4, CELLS + "keep", run, str(tmp_path), [4, 6])
    (folder, log), *_ = growing.run(3, CELLS + "write", run, str(tmp_path), Damage())
    assert folder == step_folder(tmp_path, 6)
    tensors, meta = checkpoint(tmp_path, 6)
    assert {key for key, value in tensors.items() if not same_bits(value, drawn(key, value.shape, "step 6"))} == set()
    assert meta["tokens"] == COUNTERS["tokens"]
    assert read_manifest(folder).environment["layout"] == layout
    assert (folder / "tokenizer").is_dir()
    (folder, log), *_ = growing.run(3, CELLS + "write", run, str(tmp_path), Damage())
    assert (folder, log) == (None, [])  # the disk has it

    first, *_ = growing.run(4, CELLS + "recall", run, str(tmp_path), Damage(lost=[0, 1, 2]))
    assert first.step is None
    assert (
        first.log[-1]
        == f"restored from disk: {step_folder(tmp_path, 6)} (memory lacks the parts of ranks 0 and 1 at step 6)"
    )


@pytest.fixture
def launch(growing: GrowingRanks, tiny: list[str], tmp_path: Path) -> Callable[..., Any]:
    def run(folder: str, world: int, *overrides: str, **options: Any) -> list[Any]:
        shared = ["checkpoint.interval=0", "data.micro_batch_size=1", *MEMORY, f"run.dir={tmp_path / folder}"]
        more = [str(tmp_path / folder), *options.values()]
        return growing.run(world, CELLS + "train", [*tiny, *shared, *overrides], *more, timeout=300)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("more", RUNS.values(), ids=RUNS)
def test_a_run_goes_on_from_memory_as_if_nothing_had_happened(
    more: list[str], launch: Callable[..., Any], tmp_path: Path
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch("whole", 2, *more)
    assert launch("cut", 2, *more, crash=5) == ["crash"] * 2
    assert not list((cut / "checkpoints").glob("step-*"))
    assert [row["step"] for row in read_metrics(cut) if "loss" in row] == [1, 2, 3, 4, 5]
    assert launch("cut", 2, *more)[0]["saved"] == 2  # steps 6 and 8
    assert differing(whole, cut, 8) == []
    assert "restored step 4 from memory of nodes n0 and n1" in (cut / "train.log").read_text()
    curves = [[(row["step"], row["loss"]) for row in read_metrics(run) if "loss" in row] for run in (whole, cut)]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[1]] == list(range(1, 9))


@pytest.mark.slow
def test_a_save_is_skipped_while_the_one_before_is_not_complete(launch: Callable[..., Any]):
    figures = launch("run", 2, "trainer.max_steps=12", crash=None, hung=4)
    assert [(each["saved"], each["skipped"]) for each in figures] == [(2, 4)] * 2  # steps 2 and 4
