"""The planner on mixtures of experts: what a rank takes and sends, and the degree of the expert axis that is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from distributed.cells.run import Ranks
from marking import marked

from gptlite.commands.plan import planned_config
from gptlite.config import Config, load
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.capacity import least_bytes
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.parameters import inventory, num_parameters
from gptlite.satellites.plan.planning import chosen, fixed_keys, make_plan, space_of
from gptlite.satellites.plan.search import layouts
from gptlite.satellites.plan.simulate import simulate
from gptlite.satellites.plan.traffic import transfers
from gptlite.satellites.plan.workload import FULLEST, Workload
from plan.truth import BASE, Counted, workload

EXPERTS = """
data.vocab_size=200 model=gpt-lite model.num_layers=4 model.num_heads=4 model.d_model=64 model.sequence_length=64
model.moe.experts=8 model.moe.top_k=2 model.moe.d_ff=64 data.micro_batch_size=2 data.global_batch_size=16
""".split()
TOLERANCE = 0.05
LAYOUTS = [
    (2, "data=2 expert=2 data.global_batch_size=8"),
    (4, "data=4 expert=2 zero=3"),
    (4, "data=4 expert=2 zero=3 model.moe.every=2 model.moe.shared=1"),  # blocks of two kinds
    (4, "data=2 pipeline=2 expert=2 zero=2 schedule=zero_bubble"),
    (4, "data=2 tensor=2 expert=2 zero=3 sequence=true"),
    (4, "data=4 expert=4 zero=1 activation_checkpointing=full"),
    (4, "data=4 expert=2 zero=2"),
    (4, "data=4 expert=2 zero=0"),
    (4, "data=4 expert=2 zero=3 activation_checkpointing=full"),
    (4, "data=2 pipeline=2 expert=2 zero=3"),
    (8, "data=8 expert=2 zero=1 dp_replicate=2"),
    (8, "data=2 context=2 tensor=2 expert=4 zero=2"),
    (8, "data=4 pipeline=2 expert=4 zero=3 schedule=interleaved_1f1b"),
]


def config(words: str) -> Config:
    return load([*BASE, *EXPERTS, *(key if "." in key else f"parallelism.{key}" for key in words.split())])


def work_of(world: int, words: str) -> Workload:
    return workload(config(words), world)


@pytest.mark.parametrize(("world", "words"), marked(LAYOUTS, quick=2, slow=5))
def test_a_simulated_rank_takes_and_sends_what_is_planned(world, words):
    """Model state and transfers exactly, all else within 5%, with equal loads."""
    work = replace(work_of(world, words), imbalance=1.0)
    planned, simulated = estimate(work, 0), simulate(work, 0)
    assert (planned.parameters, planned.gradients, planned.optimizer) == (
        *(simulated.peak.parameters, simulated.peak.gradients, simulated.peak.optimizer),
    )
    assert set(transfers(work, 0)) == set(simulated.transfers)
    assert planned.activations == pytest.approx(simulated.peak.activations, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["expert=2 zero=3", "expert=4", "expert=2 zero=0 activation_checkpointing=full"])
def test_real_ranks_send_what_is_planned(words):
    """The rows of all ranks together: how many come to one of them depends on their router."""
    run = config(f"data=4 {words}")
    with Ranks(4, collective_timeout=100) as ranks:
        found: list[Counted] = ranks.run("plan.truth:counted", run, timeout=100)
    work = workload(run, 4)
    planned = transfers(work, 0)
    rows = [each for each in planned if each.axis == EXPERT]
    assert {each.kind for each in rows} == {"all_to_all"}
    sent = sum(each.payload * each.count for rank in found for each in rank.transfers if each.axis == EXPERT)
    assert sent == 4 * sum(each.payload * each.count for each in rows)
    others = {each for each in planned if each.axis != EXPERT}
    for rank in found:
        assert {each for each in rank.transfers if each.axis != EXPERT} == others
        took, expected = rank.bytes, estimate(work, 0)
        assert took.total - took.activations == expected.total - expected.activations
        assert took.activations < (1 + TOLERANCE) * expected.activations


def test_a_rank_of_experts_takes_more_at_its_fullest():
    work = work_of(4, "data=4 expert=4 zero=1")
    assert work.imbalance == FULLEST
    balanced = estimate(work.balanced(1.0), 0)
    assert 1.05 < estimate(work, 0).activations / balanced.activations < FULLEST
    alone = work_of(4, "data=4 zero=1")
    assert estimate(alone, 0) == estimate(alone.balanced(1.0), 0)  # its ranks have experts of their own


def test_muons_matrices_of_a_block_are_its_attention_and_its_experts():
    """q, k and v are three matrices, the experts one of each kind; biases, gains and the router are none."""
    found = inventory(config("model.vocab_size=200").model, 1).matrices
    assert found == (((64, 64, 1),) * 4 + ((64, 64, 8),) * 2,)


def test_parameters_of_a_part_of_the_experts():
    model = work_of(1, "").model
    whole, part = num_parameters(model), num_parameters(model, expert=4)
    assert whole - part == 4 * 8 * 2 * 64 * 64 * 3 // 4  # layers, experts, matrices
    assert sum(each.elements for each in inventory(model, 1, 0, 4).kinds[0] if each.among == 4) == 2 * 2 * 64 * 64


@pytest.mark.parametrize("words", ["expert=4 zero=0", "expert=4 zero=1", "expert=2 zero=3", "expert=2 zero=0"])
def test_the_lower_bound_is_below_what_a_rank_takes(words):
    work = work_of(4, f"data=4 {words}")
    planned = estimate(work, 0)
    assert least_bytes(work) <= planned.parameters + planned.optimizer


MIXTURE = [
    *("data=synthetic", "data.vocab_size=4096", "model=moe-lite", "data.global_batch_size=32"),
    *("cluster=dgx-h100", "cluster.devices_per_node=4"),
]


def planned(*given: str) -> Config:
    return planned_config([*MIXTURE, *given])


def test_every_degree_that_divides_the_experts_and_the_data_ranks_is_looked_at():
    run = planned("model.moe.experts=6")
    space = space_of(run, run.cluster, fixed_keys(run))
    found = {(each.data, each.expert) for each in layouts(space, run.cluster, 4) if each.tensor == each.context == 1}
    assert found == {(4, 1), (4, 2), (2, 1), (2, 2), (1, 1)}


@pytest.mark.slow
def test_a_given_degree_is_kept():
    given = ("parallelism.expert=2", "parallelism.tensor=1", "data.micro_batch_size=1")
    best = chosen(planned(*given), world=4, log=lambda _: None)
    assert best.parallelism.expert == 2
    assert resolve(best.parallelism, 4).size(EXPERT) == 2


@pytest.mark.slow
def test_experts_that_do_not_fit_a_rank_are_shared():
    """0.5 billion weights with gradients and two moments, in 8 GiB: replicated they do not fit."""
    wide = ["model.moe.experts=16", "model.moe.d_ff=16384", "parallelism.zero=0", "cluster.memory_gib=8"]
    single = ("parallelism.tensor=1", "parallelism.pipeline=1", "data.micro_batch_size=1")
    plan = make_plan(planned(*wide, *single), world=4, log=lambda _: None)
    assert 1 not in {each.work.layout.size(EXPERT) for each in plan.found.ranked}
