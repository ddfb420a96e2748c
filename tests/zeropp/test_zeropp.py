"""ZeRO++ on four ranks as two nodes of two."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks

from gptlite.config import Config, load
from gptlite.satellites.compressed.blocks import BlockLayout
from zeropp.cases import SIZES, values
from zeropp.simulation import two_hops

CASES = "zeropp.cases"
ALL = "weights=int8 secondary=true gradients=int4"


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def config(options: str, *more: str, nodes: int | None = 2) -> Config:
    words = [*BASE, "precision=fp32", "model.num_layers=4", "model.d_model=64", "data.micro_batch_size=12"]
    words += ["parallelism.zero=3", "parallelism.data=4", *(f"parallelism.zeropp.{each}" for each in options.split())]
    return load([*words, *([f"parallelism.zeropp.node_size={nodes}"] if nodes else []), *more])


@pytest.mark.parametrize("node_size", [1, 2, 4])
@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_both_hops_are_those_of_float64(four: Ranks, codec: str, node_size: int):
    results = four.run(f"{CASES}:scattered", codec, node_size, {"data": 4})
    layout = BlockLayout(SIZES, 256, 4)
    blocks = np.stack([layout.pack(torch.from_numpy(each).float()).double().numpy() for each in values(4)])
    expected = torch.from_numpy(two_hops(codec, blocks, node_size)).float()
    exact = values(4).sum(0)
    for row, (out, sent, planned) in enumerate(results):
        # A code next to the middle of two may be the other one, since sums and quotients are in fp32.
        wanted = BlockLayout(SIZES, 256).unpack(expected[row][None])[0]
        error = (torch.from_numpy(out) - wanted).abs()
        assert (error > 1e-5 * expected[row].abs().max()).sum() <= 1
        assert (sent["inside"], sent["across"]) == (planned.inside, planned.across)
        assert np.abs(out - exact[row]).max() > 1e-3  # it was rounded


def test_hops_on_tensor_ranks_sum_over_their_own_data_ranks(four: Ranks):
    results = four.run(f"{CASES}:scattered", "int8", 1, {"data": 2, "tensor": 2})
    exact = values(2).sum(0)
    for rank, (out, _, _) in enumerate(results):
        assert np.abs(out - exact[rank // 2]).max() < 0.02 * np.abs(exact).max()


def test_groups_of_nodes(four: Ranks):
    def run(node_size: int | None, **layout: int) -> list:
        return four.run(f"{CASES}:nodes", layout, node_size)

    assert run(2, data=4) == [
        (2, [0, 1], [0, 2], True),
        (2, [0, 1], [1, 3], True),
        (2, [2, 3], [0, 2], True),
        (2, [2, 3], [1, 3], True),
    ]
    assert run(1, data=4)[0] == (1, None, [0, 1, 2, 3], True)
    assert run(None, data=4)[3] == (4, [0, 1, 2, 3], None, True)  # all on this machine
    assert run(1, data=2, tensor=2)[1] == (1, None, [1, 3], True)
    assert run(2, data=4, dp_replicate=2)[2] == (2, [2, 3], None, True)


@pytest.mark.slow
def test_nodes_of_tensor_ranks_and_replicas():
    with Ranks(8) as ranks:
        results = ranks.run(f"{CASES}:nodes", {"data": 4, "tensor": 2}, 2)
        assert results[5] == (2, [5, 7], [1, 5], True)
        results = ranks.run(f"{CASES}:nodes", {"data": 8, "dp_replicate": 2}, 2)
        assert results[7] == (2, [6, 7], [5, 7], True)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_all_ranks_compute_with_the_same_weights_in_both_passes(four: Ranks, precision: str):
    words = f"precision={precision}", "data.micro_batch_size=6"
    results = four.run(f"{CASES}:gathered", config("weights=int8 secondary=true", *words), 2, timeout=200)
    steps, memory = results[0]
    assert all(each[0] == steps for each in results[1:])
    assert len(steps) == 2
    for gathers in steps:
        assert max(each.error for each in gathers) <= 1
        assert min(each.error for each in gathers) > 0.1
        forward = {each.bucket: each.digest for each in gathers if not each.backward}
        backward = [each for each in gathers if each.backward]
        assert len(forward) == 5  # blocks and the rest
        assert len(backward) == 2 * 4  # of both micro-batches
        assert all(each.digest == forward[each.bucket] for each in backward)
    first, second = ({each.digest for each in gathers} for gathers in steps)
    assert first.isdisjoint(second)
    itemsize = 2 if precision == "bf16" else 4
    assert memory["copies"] == memory["elements"] * itemsize // 2


LAYOUTS = {
    "data 4": (),
    "bf16": ("precision=bf16",),
    "fp16": ("precision=fp16",),
    "accumulation": ("data.micro_batch_size=3",),
    "recomputed": ("parallelism.activation_checkpointing=full",),
    "buckets of two": ("parallelism.bucket_layers=2", "parallelism.prefetch=2"),
    "offloaded": ("parallelism.offload=cpu",),
    "tensor 2": ("parallelism.data=2", "parallelism.tensor=2", "parallelism.zeropp.node_size=1"),
    "sequence": (
        "parallelism.data=2 parallelism.tensor=2 parallelism.sequence=true parallelism.zeropp.node_size=1".split()
    ),
    "pipeline": "parallelism.data=2 parallelism.pipeline=2 data.micro_batch_size=6".split(),
    "context": "parallelism.data=2 parallelism.context=2 data.micro_batch_size=24".split(),
    "replicas": ("parallelism.dp_replicate=2", "parallelism.zeropp.node_size=1"),
    "bf16 weights": ("precision=bf16_stochastic", "data.micro_batch_size=6"),
}
QUICK = {"data 4"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_each_option_on_each_layout(four: Ranks, name: str):
    """The copy in the node changes no bit, and quantized weights and gradients are near the dense run."""

    def run(options: str) -> list:
        return four.run(f"{CASES}:train", config(options, *LAYOUTS[name]), 3, timeout=300)

    dense, copied = run(""), run("secondary=true")
    assert [(each.losses, each.weights) for each in copied] == [(each.losses, each.weights) for each in dense]
    quantized = run(ALL)
    for each in (*copied, *quantized):
        assert {"inside": 0, "across": 0, **each.sent} == each.planned
    assert quantized[0].losses != dense[0].losses
    for (loss, norm), (other, other_norm) in zip(quantized[0].losses, dense[0].losses, strict=True):
        assert loss == pytest.approx(other, abs=2e-3)
        assert norm == pytest.approx(other_norm, rel=0.02)


@pytest.mark.slow
def test_split_backward_passes(four: Ranks):
    words = "parallelism.data=2 parallelism.pipeline=2 parallelism.schedule=zbv data.micro_batch_size=6".split()
    dense, quantized = (
        four.run(f"{CASES}:train", config(options, *words), 3, timeout=300)
        for options in ("", "weights=int8 gradients=int4")
    )
    for (loss, norm), (other, other_norm) in zip(quantized[0].losses, dense[0].losses, strict=True):
        assert loss == pytest.approx(other, abs=2e-3) != other
        assert norm == pytest.approx(other_norm, rel=0.02)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_checkpoints_hold_exact_weights(four: Ranks, tmp_path: Path):
    run = config(ALL)
    first = four.run(f"{CASES}:saved", run, str(tmp_path / "a"), None, 2, 2, timeout=200)
    path, losses, _, held = first[0]
    again = four.run(f"{CASES}:saved", run, str(tmp_path / "b"), path, 0, 2, timeout=200)
    assert again[0][1] == losses
    assert again[0][2] == held
    other = config("", "parallelism.zero=1", "parallelism.data=2", "parallelism.tensor=2", nodes=None)
    loaded = four.run(f"{CASES}:saved", other, str(tmp_path / "c"), path, 0, 1, timeout=200)
    assert loaded[0][2] == held
    assert loaded[0][1][0][0] == pytest.approx(losses[0][0], abs=1e-3)


@pytest.mark.slow
def test_a_run_evaluates_the_weights_that_it_trains_with(four: Ranks, tmp_path: Path):
    path = four.run(f"{CASES}:saved", config(ALL), str(tmp_path), None, 2, 0, timeout=200)[0][0]
    own = four.run(f"{CASES}:evaluated", config(ALL), path, False, timeout=200)[0]
    rounded = four.run(f"{CASES}:evaluated", config(""), path, True, timeout=200)[0]
    exact = four.run(f"{CASES}:evaluated", config(""), path, False, timeout=200)[0]
    assert own == rounded
    assert own != exact
    assert own == pytest.approx(exact, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["weights=int8", "gradients=int4", ALL])
def test_losses_beside_dense_ones(four: Ranks, options: str):
    words = "optimizer.lr=3e-3", "schedule.warmup_steps=5", "optimizer.weight_decay=0.1", "model.dropout=0"
    dense, quantized = (
        np.array(four.run(f"{CASES}:train", config(each, *words), 30, timeout=400)[0].losses)[:, 0]
        for each in ("", options)
    )
    print(f"{options}: {dense[0]:.4f} to {dense[-1]:.4f}, differences up to {np.abs(quantized - dense).max():.2e},")
    print(f"of the mean of the last ten steps {np.abs(quantized - dense)[-10:].mean():.2e}")
    assert dense[-1] < dense[0] - 0.1
    assert np.abs(quantized - dense).max() < 5e-3
