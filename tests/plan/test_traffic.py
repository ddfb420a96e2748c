"""What a step sends, by hand where a hand can count it; against real ranks in test_memory.py and here."""

import pytest

from gptlite.satellites.plan.traffic import transfers
from gptlite.satellites.plan.workload import Transfer, Workload
from plan.truth import workload
from plan.truth_layouts import Layout
from plan.truth_table import run

ACTIVATION = 4 * 64 * 64 * 4  # bytes of a micro-batch's [B, S, d]


def of(world: int, words: str) -> Workload:
    return workload(Layout(world, words).config(), world)


def found(world: int, words: str, pp_rank: int = 0, **wanted: str) -> list[Transfer]:
    each = transfers(of(world, words), pp_rank)
    return [transfer for transfer in each if all(getattr(transfer, key) == value for key, value in wanted.items())]


def test_one_rank_sends_nothing():
    assert transfers(of(1, ""), 0) == []


def test_tensor_parallel_sums():
    # Two micro-batches, four layers: two sums a layer each way, the embedding's forward, the head's backward.
    assert found(2, "tp=2", kind="all_reduce", axis="tp") == [
        Transfer("tp", "all_reduce", 2, ACTIVATION, 2 * 9, "backward"),
        Transfer("tp", "all_reduce", 2, ACTIVATION, 2 * 9, "forward"),
    ]
    # Two floats per token, of each rank.
    assert found(2, "tp=2", kind="all_gather") == [Transfer("tp", "all_gather", 2, 2 * 256 * 8, 2, "forward")]


def test_recomputation_sums_again():
    (backward,) = found(2, "tp=2 recompute=full", kind="all_reduce", axis="tp", phase="backward")
    assert backward.count == 2 * (9 + 4)


def test_shards_are_gathered_and_reduced_as_the_stage_says():
    block = (12 * 64**2 + 13 * 64) * 4
    for zero, gathered, reduced in ((1, 1, 1), (2, 1, 4), (3, 4, 4)):
        words = f"zero={zero} micro=1"
        (forward,) = [t for t in found(2, words, kind="all_gather", phase="forward") if t.payload == block]
        assert forward.count == 4 * gathered
        again = [t.count for t in found(2, words, kind="all_gather", phase="backward")]
        assert again == ([16] if zero == 3 else [])
        (scattered,) = [t for t in found(2, words, kind="reduce_scatter") if t.payload == block]
        assert scattered.count == 4 * reduced


def test_16_bit_parameters_travel_in_half_and_gradients_do_not():
    (full,) = [t for t in found(2, "zero=1", kind="reduce_scatter") if t.count == 4]
    (half,) = [t for t in found(2, "zero=1 dtype=bf16", kind="all_gather") if t.count == 4]
    assert 2 * half.payload == full.payload
    assert found(2, "zero=1 dtype=bf16", kind="reduce_scatter") == found(2, "zero=1", kind="reduce_scatter")


@pytest.mark.parametrize(("words", "kind"), [("zero=1", "reduce_scatter"), ("zero=0", "all_reduce")])
def test_gradients_travel_in_half_where_that_is_asked(words, kind):
    axis = "dp_shard" if kind == "reduce_scatter" else "dp_replicate"
    (full,) = [t for t in found(2, f"{words} dtype=bf16", kind=kind, axis=axis) if t.count == 4]
    (half,) = [t for t in found(2, f"{words} dtype=bf16 reduce=compute", kind=kind, axis=axis) if t.count == 4]
    assert 2 * half.payload == full.payload


def test_a_pipeline_passes_each_micro_batch_on():
    assert [(t.kind, t.count, t.phase) for t in found(2, "pp=2 micro=2 tied=false", axis="pp")] == [
        ("recv", 4, "backward"),
        ("send", 4, "forward"),
    ]
    assert len(found(2, "pp=2 micro=2", axis="pp", phase="step")) == 2  # the tied embedding's gradient, to and fro
    assert found(2, "pp=2 schedule=zbv micro=2", axis="pp", phase="step") == []  # both ends on one rank


# Collectives that depend on the order of passes, and on what runs again in each half of a backward pass.
ODD = [
    Layout(4, "pp=2 zero=3 micro=1 schedule=zbv"),
    Layout(4, "pp=2 tp=2 schedule=zero_bubble recompute=full micro=2"),
    Layout(4, "pp=2 tp=2 schedule=zero_bubble recompute=selective micro=2 sequence=true ops=reference"),
    Layout(4, "pp=2 tp=2 schedule=zbv recompute=full micro=2 dropout=0.1 bias=false"),
]


def test_copies_of_key_heads_are_exchanged():
    copied = [(t.kind, t.count, t.phase) for t in found(4, "tp=4 keys=2", axis="tp") if t.kind == "all_to_all"]
    assert sorted(copied) == [("all_to_all", 8, "backward"), ("all_to_all", 8, "forward")]  # 2 micro-batches, 4 layers
    assert not [t for t in found(2, "tp=2 keys=2") if t.kind == "all_to_all"]


@pytest.mark.slow
def test_copies_of_key_heads_take_what_is_planned():
    copied = [Layout(4, "tp=4 keys=2 sequence=true"), Layout(4, "tp=4 keys=1 recompute=full micro=2")]
    assert [(row.layout.name, row.wrong) for row in run(copied) if row.wrong] == []


@pytest.mark.long
def test_recomputation_in_halves_of_a_backward_pass_is_counted():
    assert [(row.layout.name, row.wrong) for row in run(ODD) if row.wrong] == []


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("all_to_all", 75), ("send", 100), ("recv", 0)],
)
def test_bytes_on_the_wire(kind, sent):
    """Of 100 bytes over 4 ranks, in each of 3 transfers."""
    assert Transfer("tp", kind, 4, 100, 3, "forward").wire_bytes == 3 * sent
