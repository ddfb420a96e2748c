"""Training with parameters and gradients in files is the same as without offload, to the last bit."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from marking import marked

from distributed.cells.offload import Case
from distributed.cells.run import Ranks

CASES = "distributed.cells.offload:"
P = "parallelism."
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


def words(case: Case) -> str:
    return f"{case.words}-{case.world}"


@pytest.mark.parametrize("case", marked([*QUICK, *SLOW], len(QUICK), len(SLOW), words))
def test_a_run_is_the_same_to_the_bit(case: Case, ranks, tmp_path: Path):
    path = str(tmp_path)
    assert ranks(case.world).run(CASES + "differing", case, "infinite", path, timeout=150) == [[]] * case.world
