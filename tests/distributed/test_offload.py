"""Offloaded training is the same as without, to the last bit: loss, norm, gradients, values, optimizer state."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from marking import marked

from distributed.offload_cases import Case
from distributed.ranks import Ranks

CASES = "distributed.offload_cases:"
P = "parallelism."
ALONE = [
    Case(f"{P}zero=0"),
    Case(f"{P}zero=3 model.tied_embeddings=false"),
    Case(f"{P}zero=2 optimizer=sgd", accumulation=3),
    Case(f"{P}zero=1 ops=reference optimizer=adam", accumulation=1),
    Case(f"{P}zero=3 ops=reference {P}activation_checkpointing=full {P}bucket_layers=3"),
    Case(f"{P}zero=3 optimizer.clip_norm=0"),
]
TWO = [
    Case(f"{P}zero=3", 2),
    Case(f"{P}tensor=2 {P}sequence=true {P}zero=3", 2),
    Case(f"{P}pipeline=2 {P}zero=2", 2),
    Case(f"{P}zero=3 precision=bf16", 2),
    Case(f"{P}zero=0", 2, accumulation=3),
    Case(f"{P}zero=1", 2, accumulation=3),
    Case(f"{P}zero=2 model.tied_embeddings=false", 2),
    Case(f"{P}zero=2 precision=bf16", 2),
    Case(f"{P}zero=1 precision=bf16 model.tied_embeddings=false", 2),
    Case(f"{P}zero=0 precision=bf16 ops=reference", 2),
    Case(f"{P}tensor=2 {P}zero=0 model.vocab_multiple=1", 2),
    Case(f"{P}pipeline=2 {P}schedule=zbv {P}zero=3", 2, accumulation=3),
    Case(f"{P}zero=3 optimizer=sgd", 2),
]
MORE = [
    Case(f"{P}tensor=2 {P}pipeline=2 {P}zero=3", 8),
    Case(f"{P}tensor=2 {P}pipeline=2 {P}zero=0", 8),
    Case(f"{P}pipeline=2 {P}zero=3 {P}dp_replicate=2", 8, accumulation=3),
    Case(f"{P}tensor=2 {P}zero=2 {P}sequence=true model.vocab_multiple=1", 8),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks of a world, started once."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        return started.setdefault(world, Ranks(world))

    yield of
    for each in started.values():
        each.close()


COUNTED = [
    Case(f"{P}zero=0"),
    Case(f"{P}zero=3", accumulation=3),
    Case(f"{P}zero=2 optimizer=sgd", accumulation=3),
    Case(f"{P}zero=3 {P}bucket_layers=3", 2),
    Case(f"{P}tensor=2 {P}zero=1 model.vocab_multiple=1 {P}sequence=true", 2),
    Case(f"{P}pipeline=2 {P}zero=3", 2, accumulation=4),
    Case(f"{P}zero=0", 2),
    Case(f"{P}zero=1", 2),
    Case(f"{P}zero=2", 2),
    Case(f"{P}pipeline=2 {P}schedule=zbv {P}zero=2 model.tied_embeddings=false", 2, accumulation=4),
    Case(f"{P}pipeline=2 {P}zero=3 {P}dp_replicate=2", 8, accumulation=4),
    Case(f"{P}tensor=2 {P}pipeline=2 {P}zero=3", 8),
]


@pytest.mark.parametrize("case", marked(COUNTED, 6, 4, lambda case: case.words))
def test_the_bytes_moved_are_those_of_the_formula(case: Case, ranks, tmp_path: Path):
    for found, planned in ranks(case.world).run(CASES + "counted", case, "nvme", str(tmp_path), timeout=150):
        assert found == planned
        assert found.to_device > 0
        assert found.to_host > 0
        assert found.read > 0


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize(
    "case",
    [
        *marked(ALONE, 3, 3, lambda case: case.words),
        *marked(TWO, 4, 4, lambda case: case.words),
        *marked(MORE, 0, 2, lambda case: case.words),
    ],
)
def test_a_run_is_the_same_to_the_bit(case: Case, offload: str, ranks, tmp_path: Path):
    path = str(tmp_path) if offload == "nvme" else None
    assert ranks(case.world).run(CASES + "differing", case, offload, path, timeout=150) == [[]] * case.world
