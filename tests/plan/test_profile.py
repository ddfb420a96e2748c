"""The profile that the planner takes of a model: by hand, at other sizes, and of a model that nobody has described."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from gptlite.config import load
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan import profile
from gptlite.satellites.plan.cost import flops_per_token, predict
from gptlite.satellites.plan.memory import estimate, most
from gptlite.satellites.plan.parameters import inventory, num_blocks, num_parameters, stages
from gptlite.satellites.plan.planning import make_plan, space_of
from gptlite.satellites.plan.probe import record
from gptlite.satellites.plan.profile import halves_of, profile_of
from gptlite.satellites.plan.segments import ADDED, GRADIENT, MATMUL, MOVE, SIZES, between
from gptlite.satellites.plan.simulate import simulate
from gptlite.satellites.plan.traffic import transfers
from plan.truth import BASE, workload
from plan.truth_layouts import Layout

FP32 = 4


@cache
def toy(*overrides: str):
    """The second model's configuration, which knows nothing of the planner."""
    import models.toy  # noqa: F401

    keys = ("optimizer.lr=1e-2", "model.channels=24", "model.depth=4", "model.symbols=61", "data.sequence_length=64")
    return load([*BASE, "model=conv", "data.vocab_size=61", *keys, "data.global_batch_size=8", *overrides])


def toy_work(world: int, *overrides: str):
    config = toy(*overrides)
    space = space_of(config, replace(config.cluster, device="cpu", peak_tflops={"fp32": 0.1}), frozenset())
    layout = resolve(config.parallelism, world)
    return replace(space.work, parallelism=config.parallelism, layout=layout, micro_batch_size=2)


def gpt_work(words: str = "micro=4", world: int = 1):
    return workload(Layout(world, words).config(), world)


def test_products_of_a_block_are_the_models():
    """Four layers and attention, twice as much backward, each with its shape."""
    work = gpt_work()
    width, tokens = work.model.d_model, work.rank_tokens
    its = profile_of(work)
    shapes = [(op.rows, op.inner, op.columns) for op in its.blocks[0].ops if op.kind == MATMUL]
    assert shapes == [
        (tokens, width, 3 * width), (tokens, width, width), (tokens, width, 4 * width), (tokens, 4 * width, width)
    ]  # fmt: skip
    there, back = (
        sum(op.flops for op in each.ops if op.kind == MATMUL) for each in (its.blocks[0], its.blocks_back[0])
    )
    assert (there, back) == (24 * width**2 * tokens, 48 * width**2 * tokens)


def test_gradients_are_state_or_come_and_go_or_stay():
    work = gpt_work()
    back = profile_of(work).blocks_back[0]
    elements = sum(parameter.elements for parameter in inventory(work.model, 1).kinds[0])
    made = sum(event.size for event in back.events if event.role == GRADIENT)
    assert made == FP32 * elements
    assert made == -sum(event.size for event in back.events if event.role == ADDED)
    first, later, held = (sum(back.tape(*how)) for how in ((False, False), (True, False), (True, True)))
    assert first == later == held - made


def test_a_block_leaves_nothing_behind():
    """What its forward pass keeps and gives on, its backward pass gives back, but for its input's gradient."""
    work = gpt_work()
    its, activation = profile_of(work), FP32 * work.rank_tokens * work.model.d_model
    assert its.blocks[0].left > 4 * activation
    assert its.blocks[0].left + its.blocks_back[0].left == 0
    assert its.begin.left == -its.begin_back.left == activation


@pytest.mark.parametrize("words", ["", "tp=2 sequence=true", "recompute=selective"])
def test_other_micro_batches_follow_from_two(words, monkeypatch):
    """A micro-batch of 8 by its own record, and from those of SIZES."""
    world = 2 if "tp" in words else 1
    work = gpt_work(f"micro=8 {words}".strip(), world)
    work = replace(work, sequence_length=256, model=replace(work.model, sequence_length=256))
    monkeypatch.setattr(profile, "SHORTEST", 256)
    vars(profile_of)["cache_clear"]()
    scaled, exact = profile_of(work), record(work)
    assert scaled == exact


def test_records_that_differ_in_more_than_sizes_are_not_scaled():
    small, large = (record(gpt_work(f"micro={size}")) for size in SIZES)
    assert between(small, large, 8) is not None
    shorter = replace(large, end=replace(large.end, ops=large.end.ops[1:]))
    assert between(small, shorter, 8) is None


def test_bytes_of_a_pointwise_op_are_read_and_written():
    """x + y reads two tensors and writes one; in place it writes the first; a view moves nothing."""
    from gptlite.satellites.plan.watch import op_of

    x, y = torch.empty(8, 16), torch.empty(8, 16)
    add, add_, view = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.view.default
    assert op_of(add, (x, y), x + y) == (MOVE, 3 * 8 * 16 * 4, 0, 0, 0, 0, False)
    assert op_of(add_, (x, y), x) == (MOVE, 3 * 8 * 16 * 4, 0, 0, 0, 0, False)
    assert op_of(view, (x, [16, 8]), x.view(16, 8)) is None
    table, ids = torch.empty(1000, 16), torch.empty(4, dtype=torch.int64)
    found = op_of(torch.ops.aten.embedding.default, (table, ids), table[:4].clone())
    assert found is not None
    assert found.moved == 2 * 4 * 16 * 4 + 4 * 8


@pytest.mark.usefixtures("kernels")
def test_a_window_leaves_attention_the_products_of_its_keys():
    """Of S positions, w S - w² / 2 pairs of a query and a key, as the FLOPs of a model count them."""
    from gptlite.satellites.plan.watch import op_of

    heads, width, ops = 2, 4, torch.ops.gptlite
    qkv = torch.empty(1, 8, heads, 3, width, device="meta")
    q, k, v = qkv.permute(3, 0, 2, 1, 4)
    for window, pairs in ((0, 8 * 8 / 2), (3, 3 * 8 - 3 * 3 / 2), (8, 8 * 8 / 2), (20, 8 * 8 / 2)):
        for op, args in ((ops.attention_packed, (qkv, 1.0)), (ops.attention, (q, k, v, 1.0))):
            given = (*args, window) if window else args
            found = op_of(op.default, given, op(*given))
            assert found is not None
            assert found.flops == 2 * 2 * heads * width * pairs


def test_the_second_models_parameters_are_counted():
    config = toy()
    block = 24 * 24 * 3 + 24
    assert num_blocks(config.model) == 4
    assert num_parameters(config.model) == 4 * block + 61 * 24 + 61 * 24 + 61
    (first,), (last,) = (stages(toy_work(2, "parallelism.pipeline=2"), rank) for rank in (0, 1))
    assert [each.elements for each in first.others] == [61 * 24]
    assert sorted(each.elements for each in last.others) == [61, 61 * 24]


def test_the_second_models_flops_are_those_of_its_ops():
    """Of a token: a convolution of 3 x 24 x 24 and the output layer, three times a forward pass; not the padding's."""
    found = flops_per_token(toy_work(1))
    assert found == pytest.approx(6 * (4 * 3 * 24 * 24 + 24 * 61), rel=0.05)


TOYS = {
    1: ("", "parallelism.activation_checkpointing=full"),
    2: ("parallelism.zero=1", "parallelism.zero=3", "parallelism.pipeline=2", "parallelism.zero=2 precision=bf16"),
}


@pytest.mark.parametrize(("world", "words"), [(world, words) for world, each in TOYS.items() for words in each])
def test_the_second_model_is_planned_as_it_is_simulated(world, words):
    """Model state and transfers exactly, activations within 1%, with nothing written for it."""
    work = toy_work(world, *words.split())
    for rank in range(work.layout.size("pp")):
        found, planned = simulate(work, rank * (world // work.layout.size("pp"))), estimate(work, rank)
        state = [(each.parameters, each.gradients, each.optimizer) for each in (found.peak, planned)]
        assert state[0] == state[1]
        assert planned.activations == pytest.approx(found.peak.activations, rel=0.01)
        assert set(transfers(work, rank)) == set(found.transfers)


@pytest.mark.slow
def test_the_second_model_has_a_plan():
    config = toy("cluster=dgx-a100", "cluster.nodes=1", "data.global_batch_size=64")
    config.run.overrides = ["cluster=dgx-a100"]
    made = make_plan(config, 4, lambda text: None)
    best = made.best
    assert best.work.parallelism.tensor == best.work.parallelism.context == 1  # it has no plan for either
    assert {each.work.parallelism.pipeline for each in made.found.ranked} == {1, 2, 4}
    assert best.prediction.tokens_per_second > 0
    assert best.prediction.memory == most(best.work)[1]
    slower = predict(replace(best.work, parallelism=replace(best.work.parallelism)), made.cluster)
    assert slower.step_seconds == pytest.approx(best.prediction.step_seconds)


def test_halves_of_a_backward_pass_keep_what_the_other_needs():
    work = gpt_work("pp=2 schedule=zero_bubble micro=2", 2)
    its, whole = halves_of(work), profile_of(work)
    weights = sum(event.size for event in its.weights.events if event.role == GRADIENT)
    assert weights == 2 * FP32 * sum(parameter.elements for parameter in inventory(work.model, 1).kinds[0])
    assert not any(event.role == GRADIENT for event in its.inputs.events)
    assert its.inputs.left > 0  # gradients for the other half, and nothing given back
    assert 2 * (its.inputs.left + whole.blocks[0].left) + its.weights.left == pytest.approx(0, abs=whole.blocks[0].left)
