"""The time that ranks spend on communication, and which of them the others wait for."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.cells.run import Ranks
from gptlite.ops.inputs import Inputs
from gptlite.parallelism.axes import kinds
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.pipeline import MicroBatches, OnePart
from gptlite.parallelism.tensor import leave, tensor_axis
from gptlite.satellites.monitor.comm_time import summary
from gptlite.satellites.monitor.flight_recorder import shares_of
from gptlite.satellites.monitor.watchdog import RankWatch, watch_ranks

THIS = "distributed.test_comm_time"
FOUR = Mesh(torch.device("cpu"), Layout((2, 1, 1, 2)))  # pipeline 2 x tensor 2


def lag(axis: str) -> dict:
    """Steps in which rank 1 sleeps before it communicates along an axis."""
    mesh = build_mesh(ParallelismConfig(tensor=2) if axis == "tp" else ParallelismConfig())
    watch = RankWatch(mesh, 60.0)
    tensor = tensor_axis(mesh, sequence=False, overlap=False)
    for number in range(12):
        with watch.step(number + 1):
            if mesh.rank == 1:
                time.sleep(0.15)
            leave(torch.ones(1, 2, 4), tensor) if tensor else all_reduce(torch.ones(4), mesh)
        time.sleep(0.02)  # no part of a step
    row = watch.communication(2.0)
    watch.close()
    return row


def in_a_pass(axis: str | None) -> dict:
    """Steps in which ranks wait along an axis, or for the world, in a pass of a model with collectives of its own."""
    mesh = build_mesh(ParallelismConfig(tensor=2))
    watch = RankWatch(mesh, 60.0)

    def forward(part: nn.Module, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if mesh.rank == 0 if axis is None else mesh.coordinate(axis) == 0:
            time.sleep(0.15)
        dist.all_reduce(torch.ones(4), group=None if axis is None else mesh.group(axis))
        return part(x).sum()

    part = OnePart(forward, nn.Linear(2, 1), 0)
    batches = MicroBatches([torch.ones(1, 2)], [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)])
    for number in range(12):
        with watch.step(number + 1):
            part.run(batches, torch.tensor(1.0))
    row = watch.communication(2.0)
    watch.close()
    return row


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "kind"), [("tp", "tp"), ("dp_replicate", "dp"), (None, "world")])
def test_a_collective_of_a_pass_is_along_the_axis_of_its_group(four: Ranks, axis, kind) -> None:
    """Its file is in no row of the table of axes, and the files of the pipeline are on the stack."""
    row = four.run(f"{THIS}:in_a_pass", axis)[0]
    seconds = {name: row.pop(f"comm_seconds_{name}") for name in ("tp", "dp", "world")}
    assert 0.5 < seconds.pop(kind) < 1.8  # of 2 seconds
    assert max(seconds.values()) < 0.3


@pytest.mark.slow
def test_a_sleeping_rank_is_the_slowest(two: Ranks) -> None:
    row, other = two.run(f"{THIS}:lag", "tp")
    assert row == other
    assert row["slowest_rank"] == row["slowest_rank_tp"] == 1
    assert 0.5 < row["comm_seconds_tp"] < 1.7  # of 2 seconds; one of two ranks waits nearly all the time
    assert row["comm_seconds_world"] < 0.3
    assert "comm_seconds_pp" not in row


def test_the_summary_of_a_layout():
    shares = torch.zeros(4, len(kinds()))
    shares[:, [*kinds()].index("tp")] = torch.tensor([0.2, 0.2, 0.3, 0.0])
    shares[:, [*kinds()].index("pp")] = torch.tensor([0.4, 0.4, 0.0, 0.0])
    row = summary(shares, FOUR, 10.0)
    assert row["slowest_rank"] == 3
    assert row["slowest_rank_pp"] == 1  # the second stage
    assert row["slowest_rank_tp"] is None  # 0.55 and 0.7, too close to their mean
    assert row["comm_seconds_tp"] == pytest.approx(1.75)
    assert row["comm_seconds_pp"] == pytest.approx(2.0)
    assert set(row) == {
        *(f"comm_seconds_{kind}" for kind in ("tp", "pp", "world")),
        *(f"slowest_rank{kind}" for kind in ("", "_tp", "_pp")),
    }


def test_one_device_has_no_communication():
    watch = watch_ranks(Mesh(torch.device("cpu")), 10.0)
    with watch.step(1):
        pass
    assert watch.communication(1.0) == {}
    watch.close()


def test_shares_of_recorded_collectives():
    def entry(start: float, milliseconds: float | None, group: str) -> dict:
        return {"time_created_ns": start * 1e9, "duration_ms": milliseconds, "process_group": ["0", group]}

    entries = [
        entry(90.0, 500.0, "mesh_tp"),  # before
        entry(102.0, 400.0, "mesh_tp"),
        entry(103.0, 200.0, "mesh_dp_shard"),
        entry(104.0, 200.0, "mesh_dp_replicate"),
        entry(105.0, 800.0, "default_pg"),
        entry(106.0, None, "mesh_pp"),  # under way
    ]
    assert shares_of(entries, 100.0, 110.0) == pytest.approx({"tp": 0.05, "dp": 0.05, "world": 0.1})
    assert shares_of([], 100.0, 110.0) == {}
