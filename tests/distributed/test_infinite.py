"""Training with parameters and gradients in files is the same as without offload, to the last bit."""

from pathlib import Path

import pytest
from marking import marked

from distributed.cells.offload import Case
from distributed.cells.reshard_pairs import SINGLE, Pair
from gptlite.config import load
from gptlite.launch.room import state_file_bytes
from gptlite.parallelism.layout import resolve

CASES = "distributed.cells.offload:"
P = "parallelism."
EXPERTS = "model.moe.experts=4 model.moe.d_ff=16 model.moe.shared=1"
QUICK = [
    Case(f"{P}zero=3", accumulation=1),
    Case(f"{P}zero=3 model.tied_embeddings=false ops=reference", accumulation=3),
    Case(f"{P}zero=3 {P}activation_checkpointing=full {P}prefetch=2", 2, accumulation=3),
]
SLOW = [
    Case(f"{P}zero=3 {P}activation_checkpointing=full {P}bucket_layers=3"),
    Case(f"{P}zero=3 optimizer=sgd", accumulation=3),
    Case(f"{P}zero=3 optimizer.clip_norm=0"),
    Case(f"{P}zero=3", 2, accumulation=1),
    Case(f"{P}zero=3 model.vocab_multiple=1 ops=reference", 4),
    Case(f"{P}zero=3 {P}activation_checkpointing=selective", 4, accumulation=1),
    Case(f"{P}context=2 {P}zero=3 precision=amp_o1", 2),
    Case(f"{P}zero=3 precision=bf16", 2),
    Case(f"{P}zero=3 precision=fp16", 2, accumulation=3),
    Case(f"{P}tensor=2 {P}sequence=true {P}zero=3", 4),
    Case(f"{P}tensor=2 {P}sequence=true {P}zero=3 ops=reference", 2),
    Case(f"{P}pipeline=2 {P}zero=3", 4),
    Case(f"{P}pipeline=2 {P}schedule=zbv {P}zero=3", 2, accumulation=3),
    Case(f"{P}zero=3 {EXPERTS}", accumulation=3),
    Case(f"{P}zero=3 {EXPERTS} {P}activation_checkpointing=full", 2),
    Case(f"{P}zero=3 {P}expert=2 {EXPERTS}", 4),
]
INTERRUPTED = [
    Case(f"{P}zero=3", accumulation=3),
    Case(f"{P}zero=3 {P}activation_checkpointing=full {P}prefetch=2 model.tied_embeddings=false", 2),
    Case(f"{P}zero=3 {P}expert=2 {EXPERTS}", 2),
]


COUNTED = [
    Case(f"{P}zero=3", accumulation=3),
    Case(f"{P}zero=3 {P}bucket_layers=3 optimizer=sgd", 2, accumulation=1),
    Case(f"{P}zero=3 {P}prefetch=3 model.tied_embeddings=false", 2, accumulation=3),
    Case(f"{P}context=2 {P}zero=3 precision=bf16", 4),
    Case(f"{P}zero=3 {EXPERTS}"),
    Case(f"{P}zero=3 {P}expert=2 {EXPERTS}", 4),
]
MEASURED = [
    Case(f"{P}zero=3"),
    Case(f"{P}zero=3 {P}bucket_layers=3", 2),
    Case(f"{P}zero=3 precision=bf16", 2),
]


def words(case: Case) -> str:
    return f"{case.words}-{case.world}"


@pytest.mark.parametrize("case", marked([*QUICK, *SLOW], len(QUICK), len(SLOW), words))
def test_a_run_is_the_same_to_the_bit(case: Case, worlds, tmp_path: Path):
    path = str(tmp_path)
    assert worlds(case.world).run(CASES + "differing", case, "infinite", path, timeout=150) == [[]] * case.world


@pytest.mark.parametrize("case", marked(INTERRUPTED, 1, 2, words))
def test_an_evaluation_and_a_sample_between_steps_are_the_same_and_change_nothing(case: Case, worlds, tmp_path: Path):
    """The next step meets the buffers that the evaluation has left."""
    path = str(tmp_path)
    assert worlds(case.world).run(CASES + "interrupted", case, "infinite", path, timeout=150) == [[]] * case.world


@pytest.mark.parametrize("case", marked(COUNTED, 1, 5, words))
def test_the_bytes_moved_are_those_of_the_formula(case: Case, worlds, tmp_path: Path):
    for found, planned in worlds(case.world).run(CASES + "counted", case, "infinite", str(tmp_path), timeout=150):
        assert found == planned
        assert found.read > found.written > 0


@pytest.mark.parametrize("case", marked(MEASURED, 1, 2, words))
def test_memory_is_what_the_plan_says(case: Case, worlds, tmp_path: Path):
    for found, planned, _ in worlds(case.world).run(CASES + "memory", case, "infinite", str(tmp_path), timeout=150):
        state = found.parameters, found.gradients, found.optimizer
        assert state == (planned.parameters, planned.gradients, planned.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", ["", f"{P}bucket_layers=2"])
def test_distributed_experts_have_buffers_of_the_largest_group(buckets: str, worlds, tmp_path: Path):
    """A block's experts are gathered apart from its bucket."""
    case = Case(f"{P}zero=3 {P}expert=2 {EXPERTS} {buckets}", 4)
    for found, planned in worlds(4).run(CASES + "buffers", case, "infinite", str(tmp_path), timeout=150):
        assert found == planned


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_room_that_is_asked_for_is_the_files_own(optimizer: str, worlds, tmp_path: Path):
    run = [*Pair(SINGLE, SINGLE).overrides(SINGLE), "run.dir=unused", f"optimizer={optimizer}"]
    config = load(
        [*run, f"{P}offload=nvme", f"{P}offload_path={tmp_path}", f"{P}offload_parameters=true", f"{P}zero=3"]
    )
    (size,) = worlds(1).run(CASES + "file_size", config)
    assert size == state_file_bytes(config, resolve(config.parallelism, 1), 1)
