"""Recording and comparing on one process: equal runs are equal, and a planted difference is found and named."""

import dataclasses
import math
from functools import lru_cache

import pytest
import torch

from distributed.cells.layouts import BASE
from gptlite.config import load
from gptlite.satellites.parity.compare import compare, distances, fp32_limits, half_limits
from gptlite.satellites.parity.gather import Disagreement, Part, Whole, assemble
from gptlite.satellites.parity.record import StepRecord, recorded
from gptlite.satellites.parity.report import row, verdict

SMALL = ("model.num_layers=2", "data.global_batch_size=12", "model.vocab_multiple=64")
UP = "layers.1.mlp.up.weight"


@lru_cache
def steps(*overrides: str) -> list[StepRecord]:
    return [*recorded(load([*BASE, *SMALL, "data.micro_batch_size=12", *overrides]), 3)]


@pytest.fixture
def reference() -> list[StepRecord]:
    return steps("precision=fp32")


def changed(step: StepRecord, kind: str, name: str, value: torch.Tensor) -> StepRecord:
    wholes = getattr(step, kind)
    return dataclasses.replace(step, **{kind: wholes | {name: dataclasses.replace(wholes[name], value=value)}})


def differences(step: StepRecord, reference: StepRecord) -> list[str]:
    return [str(each) for each in compare(step, reference, fp32_limits()).differences]


def test_a_step_records_every_tensor_whole_and_what_it_did(reference):
    names = set(reference[0].gradients)
    assert {"token_embedding.weight", "position_embedding.weight", "layers.0.attn.qkv.bias", UP} <= names
    assert len(names) == 2 + 2 * 12 + 2
    assert set(reference[0].values) == names
    assert [step.step for step in reference] == [1, 2, 3]
    squares = [whole.value.double().square().sum().item() for whole in reference[0].gradients.values()]
    assert math.sqrt(sum(squares)) == pytest.approx(reference[0].grad_norm, rel=1e-6)
    first, second = (step.values[UP].value for step in reference[:2])
    # AdamW's steps are about one learning rate long.
    assert (second - first).abs().median() == pytest.approx(reference[1].lr, rel=0.5)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulation_changes_nothing(reference, micro_batch_size):
    other = steps("precision=fp32", f"data.micro_batch_size={micro_batch_size}")
    comparisons = [compare(ours, theirs, fp32_limits()) for ours, theirs in zip(other, reference, strict=True)]
    assert [each.differences for each in comparisons] == [[], [], []]
    same, words = verdict(comparisons, fp32_limits())
    assert same
    assert words.startswith("same: 3 steps, 28 tensors; loss within ")


def test_bf16_is_as_close_to_one_process_as_that_is_to_fp32_and_no_closer(reference):
    whole, cut = steps("precision=bf16"), steps("precision=bf16", "data.micro_batch_size=2")
    apart = [distances(a, b, rms=True) for a, b in zip(whole, reference, strict=True)]
    limits = half_limits(apart, torch.finfo(torch.bfloat16).eps)
    assert [compare(a, b, limits).differences for a, b in zip(cut, whole, strict=True)] == [[], [], []]
    assert all(compare(a, b, fp32_limits()).differences for a, b in zip(cut, whole, strict=True))
    # An update left out, and a gradient a fifth too long, are no rounding.
    before = changed(cut[1], "values", UP, cut[0].values[UP].value)
    assert UP in {each.name for each in compare(before, whole[1], limits).differences}
    longer = changed(cut[1], "gradients", UP, cut[1].gradients[UP].value * 1.2)
    assert [each.name for each in compare(longer, whole[1], limits).differences] == [UP]


def test_in_16_bits_values_whose_gradient_is_rounding_alone_are_not_judged(reference):
    gradient = torch.tensor([1.0, -1.0, 1e-4, -1e-4, 0.0])
    for at, error in enumerate([0.6, 0.6, 0.0, 0.0, 0.6]):
        step = changed(reference[0], "gradients", UP, gradient)
        step = changed(step, "values", UP, torch.zeros(5))
        other = changed(step, "values", UP, torch.eye(5)[at] * step.lr * 0.6 * math.sqrt(3))
        assert distances(other, step, rms=True).values[UP] == pytest.approx(error)


PLANTED = {
    "a gradient": ("gradients", lambda t: t * 1.001, f"step 2: gradient of {UP} is off by 1.0e-03 (limit 1.0e-04)"),
    "a value": ("values", lambda t: t + 2e-4 * 0.2, f"step 2: value of {UP} is off by 2.0e-01 (limit 1.0e-01)"),
    "no number": ("gradients", lambda t: t * math.nan, f"step 2: gradient of {UP} is off by nan (limit 1.0e-04)"),
    "another shape": ("values", lambda t: t[1:], f"step 2: value of {UP} is off by inf (limit 1.0e-01), its shape is"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(reference, name):
    kind, change, words = PLANTED[name]
    step = changed(reference[1], kind, UP, change(getattr(reference[1], kind)[UP].value))
    (found,) = differences(step, reference[1])
    assert found.startswith(words)


def test_losses_and_norms_are_judged_and_a_missing_tensor_is_named(reference):
    step = dataclasses.replace(reference[0], loss=reference[0].loss * 1.0001, grad_norm=reference[0].grad_norm * 0.999)
    assert [found.split(" is ")[0] for found in differences(step, reference[0])] == [
        "step 1: loss",
        "step 1: gradient norm",
    ]
    fewer = {name: whole for name, whole in reference[0].gradients.items() if name != UP}
    (found,) = differences(dataclasses.replace(reference[0], gradients=fewer), reference[0])
    assert found == f"step 1: gradient of {UP} is off by inf (limit 1.0e-04), only one of the two runs has it"


def test_the_shard_that_is_off_is_named_with_its_ranks_and_so_is_one_held_by_nobody(reference):
    value = reference[0].gradients[UP].value.clone()
    value[32:64] = 0
    boxes = {((start, start + 32), (0, 32)): [rank, rank + 4] for rank, start in enumerate(range(0, 128, 32))}
    step = dataclasses.replace(reference[0], gradients=reference[0].gradients | {UP: Whole(value, boxes, [])})
    assert differences(step, reference[0])[0].endswith("in 1 of 4 shards, most in rows 32 to 63 on ranks 1, 5")
    value[32:64] = torch.nan
    assert differences(step, reference[0])[0].endswith("some elements are held by no rank, or are NaN")


def test_copies_must_be_the_same_bits_and_all_ranks_report_the_same(reference):
    box = ((0, 128), (0, 32))
    whole = reference[0].values[UP]
    drifted = dataclasses.replace(whole, disagreements=[Disagreement(box, (0, 3), 1e-9)])
    step = dataclasses.replace(
        reference[0], values=reference[0].values | {UP: drifted}, reports=[(1.0, 2.0, 3.0), (1.0, 2.5, 3.0)]
    )
    assert differences(step, reference[0]) == [
        f"step 1: copy of the value of {UP} is off by 1.0e-09 (limit 0.0e+00), ranks 0 and 3 differ in all of it",
        "step 1: reported gradient norm is off by 5.0e-01 (limit 0.0e+00), rank 1 and rank 0",
    ]


def test_parts_of_ranks_are_put_together_and_their_copies_compared():
    tensor = torch.arange(12.0).view(4, 3)
    upper, lower, empty = ((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 4), (0, 3))
    row_of = {upper: tensor[:2], lower: tensor[2:], empty: tensor[4:]}

    def share(*boxes, plus=0.0):
        return [Part("a", (4, 3), box, row_of[box] + plus) for box in boxes]

    whole = assemble([share(upper), share(lower, upper), share(empty)])["a"]
    assert torch.equal(whole.value, tensor)
    assert whole.holders == {upper: [0, 1], lower: [1]}
    assert whole.disagreements == []
    drifted = assemble([share(upper), share(upper, plus=0.5), share(lower)])["a"]
    assert drifted.disagreements == [Disagreement(upper, (0, 1), 0.5)]
    assert assemble([share(upper)])["a"].value.isnan().sum() == 6
    with pytest.raises(ValueError, match="shape"):
        assemble([share(upper), [share(lower)[0]._replace(shape=(5, 3))]])


def test_the_verdict_names_the_first_tensor_and_the_worst(reference):
    worse = changed(reference[1], "gradients", UP, reference[1].gradients[UP].value * 2)
    name = "layers.0.attn_norm.weight"
    both = changed(worse, "gradients", name, reference[1].gradients[name].value * 1.01)
    comparisons = [compare(*pair, fp32_limits()) for pair in zip([reference[0], both], reference[:2], strict=True)]
    same, words = verdict(comparisons, fp32_limits())
    assert not same
    first, second = words.splitlines()
    assert first.startswith(f"different: step 2: gradient of {name} is off by 1.0e-02 (limit 1.0e-04)")
    assert second == f"in that step 2 of 28 gradients differ, {UP} most"
    assert f"1.0e+00 {UP}" in row(comparisons[1])
