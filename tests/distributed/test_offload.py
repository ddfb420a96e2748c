"""Offloaded training is the same as without, to the last bit: loss, norm, gradients, values, optimizer state."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from marking import marked

from distributed.cells.offload import Case
from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import Layout
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.parameters import stages
from gptlite.satellites.plan.workload import Workload

CASES = "distributed.cells.offload:"
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
    Case(f"{P}tensor=2 {P}sequence=true {P}zero=3", 2, layers=2),
    Case(f"{P}pipeline=2 {P}zero=2", 2),
    Case(f"{P}zero=3 precision=bf16", 2, layers=2),
    Case(f"{P}zero=0", 2, accumulation=3),
    Case(f"{P}zero=1", 2, accumulation=3),
    Case(f"{P}zero=2 model.tied_embeddings=false", 2),
    Case(f"{P}zero=2 precision=bf16", 2),
    Case(f"{P}zero=1 precision=bf16 model.tied_embeddings=false", 2),
    Case(f"{P}zero=0 precision=bf16 ops=reference", 2),
    Case(f"{P}tensor=2 {P}zero=0 model.vocab_multiple=1", 2),
    Case(f"{P}pipeline=2 {P}schedule=zbv {P}zero=3", 2, accumulation=3),
    Case(f"{P}zero=3 optimizer=sgd", 2),
    Case(f"{P}zero=2 precision=fp16", 2, accumulation=3),
    Case(f"{P}context=2 {P}zero=3 precision=amp_o1", 2),
    Case(f"{P}zero=1 precision=amp_o2", 2),
    Case(f"{P}context=2 {P}zero=0", 2),
]
MORE = [
    Case(f"{P}tensor=2 {P}pipeline=2 {P}zero=3", 8),
    Case(f"{P}tensor=2 {P}pipeline=2 {P}zero=0", 8),
    Case(f"{P}pipeline=2 {P}zero=3 {P}dp_replicate=2", 8, accumulation=3),
    Case(f"{P}tensor=2 {P}zero=2 {P}sequence=true model.vocab_multiple=1", 8),
]


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
    # Sequences cut, and every precision: shards are over data x context ranks, and always moved in fp32.
    Case(f"{P}context=2 {P}zero=3 precision=bf16", 2),
    Case(f"{P}context=2 {P}zero=1 precision=amp_o1", 2, accumulation=3),
    Case(f"{P}context=4 {P}zero=2 precision=fp16", 8, accumulation=3),
    Case(f"{P}context=2 {P}tensor=2 {P}pipeline=2 {P}zero=3 precision=amp_o2", 8, accumulation=4),
    Case(f"{P}context=4 {P}pipeline=2 {P}schedule=zbv {P}zero=0 precision=bf16", 8, accumulation=4),
    Case(f"{P}context=2 {P}dp_replicate=2 {P}zero=2 model.tied_embeddings=false precision=fp16", 8, accumulation=3),
]


@pytest.mark.parametrize("case", marked(COUNTED, 4, 6, lambda case: case.words))
def test_the_bytes_moved_are_those_of_the_formula(case: Case, worlds, tmp_path: Path):
    for found, planned in worlds(case.world).run(CASES + "counted", case, "nvme", str(tmp_path), timeout=150):
        assert found == planned
        assert found.to_device > 0
        assert found.to_host > 0
        assert found.read > 0


MEASURED = [
    Case(f"{P}zero=0"),
    Case(f"{P}zero=3"),
    Case(f"{P}zero=2 precision=bf16"),
    Case(f"{P}zero=2 optimizer=sgd", accumulation=1),
    Case(f"{P}zero=3 precision=bf16", 2),
    Case(f"{P}zero=1", 2),
]


@pytest.mark.parametrize("case", marked(MEASURED, 3, 3, lambda case: case.words))
def test_memory_is_what_the_plan_says(case: Case, worlds, tmp_path: Path):
    """On a CPU, whose memory is the device's and the host's. For the moments, in the file, there are two buffers."""
    for found, planned, _ in worlds(case.world).run(CASES + "memory", case, "nvme", str(tmp_path), timeout=150):
        assert (found.parameters, found.gradients, found.optimizer) == (
            planned.parameters,
            planned.gradients,
            planned.optimizer,
        )


def test_a_gpus_memory_and_its_hosts():
    """docs/offload.md: 16 bytes a parameter of the host's, and what computes on the device."""
    work = Workload(
        model=GPTConfig(num_layers=2, num_heads=4, d_model=64, vocab_size=64, vocab_multiple=1, sequence_length=16),
        parallelism=ParallelismConfig(offload=Offload.cpu),
        layout=Layout(),
        optimizer=AdamWConfig(),
        global_batch_size=8,
        micro_batch_size=4,
        sequence_length=16,
        dtype="bf16",
        attention=Attention.sdpa,
    )
    (stage,) = stages(work, 0)
    count = sum(parameter.elements for parameter in stage.parameters())
    counters = 4 * len(stage.parameters())
    for zero, device, gradients in ((0, 2, 4), (1, 2, 4), (2, 2, 0)):
        found = estimate(replace(work, parallelism=replace(work.parallelism, zero=zero)), 0)
        assert (found.parameters, found.gradients, found.optimizer) == (device * count, gradients * count, 0)
        assert found.host == 16 * count + counters
    infinite = replace(work.parallelism, zero=3, offload=Offload.nvme, offload_buffer_mib=1)
    found = estimate(replace(work, parallelism=infinite), 0)
    others = 2 * sum(parameter.elements for parameter in stage.others)
    assert (found.parameters, found.gradients, found.optimizer) == (others, 0, 0)
    assert found.host <= 8 * count + 2 * 2**20 + counters


PLACES = ["cpu", "nvme"]
QUICK = [*product(ALONE[:3], ["nvme"]), *zip(TWO[:4], 2 * PLACES, strict=True)]
SLOW = [each for each in product([*ALONE, *TWO[:8], *MORE[:2]], PLACES) if each not in QUICK]
LONG = list(product([*TWO[8:], *MORE[2:]], PLACES))


@pytest.mark.parametrize(
    ("case", "offload"),
    marked([*QUICK, *SLOW, *LONG], len(QUICK), len(SLOW), lambda each: f"{each[0].words}-{each[1]}"),
)
def test_a_run_is_the_same_to_the_bit(case: Case, offload: str, worlds, tmp_path: Path):
    path = str(tmp_path) if offload == "nvme" else None
    assert worlds(case.world).run(CASES + "differing", case, offload, path, timeout=150) == [[]] * case.world
