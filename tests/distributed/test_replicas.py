"""Ranks whose copies of a parameter differ are named, and their run ends unsaved."""

import json
import platform
from pathlib import Path

import pytest
import torch
from run_files import read_metrics
from torch import nn

import gptlite.satellites.monitor.replicas
from distributed.cells.run import Ranks
from gptlite.config import load
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.tensor import cut, tensor_axis
from gptlite.satellites.monitor.replicas import ReplicasDiffer, check_replicas, fingerprint
from gptlite.start.pretrain import pretrain

THIS = "distributed.test_replicas"


def replicas(layout: dict[str, int], flip: tuple[int, str] | None) -> str:
    """Builds parameters, flips one bit of one on one rank, and compares."""
    mesh = build_mesh(ParallelismConfig(**layout))  # type: ignore[arg-type]
    torch.manual_seed(0)
    named = [("norm.weight", nn.Parameter(torch.randn(64))), ("linear.weight", nn.Parameter(torch.randn(64, 64)))]
    named.append(("scale", nn.Parameter(torch.randn(()))))
    axis = tensor_axis(mesh, sequence=False, overlap=False)
    if axis is not None:
        named[1] = ("linear.weight", cut(named[1][1], axis, 0))
    if mesh.coordinate("pp") in (0, mesh.size("pp") - 1):
        named.append(("embedding.weight", nn.Parameter(torch.randn(10, 4))))
    if flip is not None and mesh.rank == flip[0]:
        tensor = dict(named)[flip[1]]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
        local.detach().view(torch.int32).flatten()[-1] ^= 1
    try:
        check_replicas(named, ["embedding.weight"], mesh, 200)
    except ReplicasDiffer as error:
        return str(error)
    return ""


def test_a_flipped_bit_is_named(two: Ranks) -> None:
    def run(flip: tuple[int, str] | None, **layout: int) -> str:
        results = two.run(f"{THIS}:replicas", layout, flip)
        assert len(set(results)) == 1
        return results[0]

    for layout in ({"tensor": 2}, {"pipeline": 2}, {}):
        assert run(None, **layout) == ""
    node = platform.node()
    end = "ranks 0 and 1 (world ranks 0 and 1) after step 200; without a majority, one of them is wrong: "
    end += f"rank 0 on {node}, rank 1 on {node}"
    assert run((1, "norm.weight"), tensor=2) == f"parameter norm.weight differs between tp {end}"
    assert run((1, "linear.weight"), tensor=2) == ""  # each rank has a part of its own
    assert run((0, "linear.weight")) == f"parameter linear.weight differs between dp_replicate {end}"
    assert run((1, "scale"), zero=3) == f"parameter scale differs between dp_shard {end}"
    assert run((1, "norm.weight"), zero=3) == ""  # a shard, which other data ranks do not hold
    assert run((1, "embedding.weight"), pipeline=2) == f"parameter embedding.weight differs between pp {end}"
    assert run((1, "norm.weight"), pipeline=2) == ""  # another stage's


@pytest.mark.slow
def test_the_line_of_ranks_is_named() -> None:
    with Ranks(8) as ranks:
        (message,) = set(ranks.run(f"{THIS}:replicas", {"tensor": 2}, (5, "linear.weight")))
        assert message == (
            "parameter linear.weight differs between dp_replicate ranks 0, 1, 3 and 2 (world ranks 1, 3, 7 and 5) "
            f"after step 200; wrong: rank 5 on {platform.node()}, by majority"
        )


def train_with_a_flip(overrides: list[str]) -> int:
    """Trains; before the check after step 4 rank 1 flips a bit."""

    def check(parameters, tied: list[str], mesh: Mesh, step: int, node: str | None = None) -> None:
        named = list(parameters)
        if step == 4 and mesh.rank == 1:
            dict(named)["layers.1.attn_norm.weight"].detach().view(torch.int32)[0] ^= 1
        check_replicas(named, tied, mesh, step, node)

    gptlite.satellites.monitor.replicas.check_replicas = check
    try:
        return pretrain(load(overrides)).exit_code
    finally:
        gptlite.satellites.monitor.replicas.check_replicas = check_replicas


def test_a_run_whose_replicas_differ_ends_unsaved(two: Ranks, tiny: list[str], tmp_path: Path) -> None:
    options = ["parallelism.tensor=2", "trainer.replica_check_interval=2", "checkpoint.interval=3"]
    results = two.run(f"{THIS}:train_with_a_flip", [*tiny, *options, f"run.dir={tmp_path / 'a'}"], timeout=150)
    assert results == [1, 1]
    error = "parameter layers.1.attn_norm.weight differs between tp ranks 0 and 1 (world ranks 0 and 1) after step 4"
    error += f"; without a majority, one of them is wrong: rank 0 on {platform.node()}, rank 1 on {platform.node()}"
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"] == f"failed: {error}"
    assert f"error: {error}. Nothing was saved" in (tmp_path / "a" / "train.log").read_text()
    assert [path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*")] == ["step-00000003"]
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["comm_seconds_tp"] <= row["step_seconds"] for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 511, 512, 4096, 5000])
def test_any_bit_changes_the_fingerprint(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randn(length + 1).to(dtype)[1:]  # not at an even address
    whole = fingerprint(tensor)
    assert torch.equal(whole, fingerprint(tensor.clone()))
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in (0, length // 2, length - 1):
        if length:
            for bit in (0, 7, 8 * bits.element_size() - 1):
                flip = torch.tensor(-1).bitwise_left_shift(bit) ^ torch.tensor(-1).bitwise_left_shift(bit + 1)
                bits[place] ^= flip.to(bits.dtype)
                assert not torch.equal(whole, fingerprint(tensor))
                bits[place] ^= flip.to(bits.dtype)
