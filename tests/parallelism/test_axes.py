"""The axes' table: a row more is an axis more, to all that go through the axes."""

import linecache
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gptlite
from gptlite.config import load
from gptlite.config.checks import check
from gptlite.errors import ConfigError
from gptlite.parallelism import axes
from gptlite.parallelism.axes import kinds
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout, resolve
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.monitor import flight_recorder, stack_sampling
from gptlite.satellites.monitor.comm_time import summary
from gptlite.torch_private.simulation import imagined_world

CPU = torch.device("cpu")
TWELVE = ParallelismConfig(tensor=2, pipeline=2, zero=1, expert=3)  # on 24 ranks: pipeline 2 x data 6 x tensor 2


def test_each_axis_is_described_in_the_docs():
    text = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = {row[0]: row for row in found if len(row) == 5}
    for axis in axes.every_axis():
        _, keys, cuts, *_ = cells[axis.label or "data"]
        assert f"`{axis.key}`" in keys.replace(", ", " ").split()
        assert cuts.startswith(axis.divides)


def test_a_row_says_what_is_there():
    homes = {"gptlite": Path(gptlite.__file__).parents[1], "torch": Path(torch.__file__).parents[1]}
    for axis in axes.every_axis():
        assert axis.key in ParallelismConfig.__dataclass_fields__
        assert all((homes[file.partition("/")[0]] / file).exists() for file in axis.files)
        # Neighbours in the mesh, slowest first, or a run of their ranks would be no line.
        assert ",".join(axis.over) in ",".join(axes.AXES)


def test_a_folded_axis_regroups_the_ranks_of_a_layout():
    layout, plain = resolve(TWELVE, 24), resolve(replace(TWELVE, expert=1), 24)
    assert layout == Layout((2, 1, 6, 2), (1, 3))
    assert layout.expert_sizes == (2, 1, 2, 3, 2)
    assert (layout.size("ep"), layout.size("cp"), plain.size("ep")) == (3, 1, 1)
    # Its degree neither multiplies the world nor makes ranks read the same samples.
    assert (layout.world_size, layout.data_size, layout.fsdp_size) == (24, 6, 6)
    assert layout.describe(TWELVE) == "pipeline 2 x data 6 (zero 1) x expert 3 x tensor 2, 1f1b"
    assert plain.describe(TWELVE) == "pipeline 2 x data 6 (zero 1) x tensor 2, 1f1b"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ParallelismConfig(zero=1, expert=4),
            "=4 does not divide the 6 ranks of dp_shard; try parallelism.expert=1, 2, 3, 6",
        ),
        (
            ParallelismConfig(expert=4),
            "=4 does not divide the 6 ranks of dp_replicate x dp_shard; try parallelism.expert=1",
        ),
    ],
)
def test_a_folded_axis_that_does_not_fit_its_ranks_is_refused(config, message):
    with pytest.raises(ConfigError) as refusal:
        resolve(config, 6)
    assert str(refusal.value).startswith(f"parallelism.expert{message}")


def test_the_degree_of_a_row_is_checked():
    config = load([])
    with pytest.raises(ConfigError, match=r"^parallelism.expert=0 must be at least 1$"):
        check(replace(config, parallelism=ParallelismConfig(expert=0)))


@pytest.mark.filterwarnings("ignore:Set timeout")
def test_a_folded_axis_has_groups_of_neighbours():
    for rank in range(24):
        stage, tensor = rank // 12, rank % 2
        mine = [12 * stage + 2 * shard + tensor for shard in range(6)]
        mine = mine[:3] if rank in mine[:3] else mine[3:]
        with imagined_world(rank, 24):
            mesh = build_mesh(TWELVE)
            groups = {axis: dist.get_process_group_ranks(group) for axis, group in mesh.groups().items()}
            described = mesh.group("ep").group_desc
            mesh.close()
        assert list(groups) == ["pp", "dp_shard", "tp", "ep"]
        assert groups["ep"] == mine
        assert mesh.coordinate("ep") == mine.index(rank)
        assert flight_recorder.axis_of_entry({"process_group": ["0", described]}) == "ep"


def test_a_folded_axis_and_one_that_shares_sequences_take_the_same_ranks():
    layout = resolve(ParallelismConfig(context=2, zero=3, expert=4), 8)
    places = [
        (layout.data_rank(rank), layout.coordinate(rank, "cp"), layout.coordinate(rank, "ep")) for rank in range(8)
    ]
    assert places == [(rank // 2, rank % 2, rank % 4) for rank in range(8)]
    assert layout.describe(ParallelismConfig(zero=3)) == "data 4 (zero 3) x context 2 x expert 4"


def test_a_kind_of_axis_more_is_timed():
    assert tuple(kinds()) == ("tp", "ep", "cp", "pp", "dp", "world")
    mesh = Mesh(CPU, Layout((1, 1, 4, 1), (1, 2)))
    shares = torch.zeros(4, 6)
    shares[:, tuple(kinds()).index("ep")] = torch.tensor([0.5, 0.0, 0.5, 0.0])
    row = summary(shares, mesh, 10.0)
    assert list(row) == [
        *("comm_seconds_ep", "comm_seconds_dp", "comm_seconds_world"),
        *("slowest_rank", "slowest_rank_ep", "slowest_rank_dp"),
    ]
    assert (row["comm_seconds_ep"], row["slowest_rank_ep"]) == (2.5, 1)


def test_a_rank_that_waits_in_the_file_of_a_row_waits_along_its_axis():
    file, source = f"{stack_sampling.PACKAGE}parallelism/expert.py", "def exchange(work):\n    work.wait()\n"
    linecache.cache[file] = (len(source), None, [*source.splitlines(True)], file)
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), scope)
    done = threading.Lock()
    with done:
        thread = threading.Thread(target=scope["exchange"], args=(SimpleNamespace(wait=done.acquire),))
        thread.start()
        assert thread.ident is not None
        time.sleep(0.2)
        place = stack_sampling.place_of(thread.ident, {})
    thread.join()
    assert (place.waits, place.axis) == ("collective", "ep")
    assert place.waiting_for == "tokens over ep"


def test_each_group_of_a_mesh_has_the_kind_of_its_axis():
    with imagined_world(0, 24):
        mesh = build_mesh(TWELVE)
        groups = stack_sampling.axes_of_groups(mesh)
        kinds = {name: groups[mesh.group(name).group_name] for name in ("pp", "dp_shard", "tp", "ep")}
        experts = {groups[group.group_name] for group in mesh.expert_groups().values()}
        mesh.close()
    assert kinds == {"pp": "pp", "dp_shard": "dp", "tp": "tp", "ep": "ep"}
    assert experts == {"dp"}


def test_what_runs_in_a_backward_pass_is_no_phase_of_its_own():
    """Recomputation calls forward methods there."""

    def forward() -> str:
        return stack_sampling._words([frame for frame, _ in walk_stack(sys._getframe())])

    def _engine_run_backward() -> str:
        return forward()

    def evaluate() -> str:
        return _engine_run_backward()

    assert forward().startswith("forward, in ")
    assert _engine_run_backward().startswith("backward, in ")
    assert evaluate().startswith("evaluation, backward, in ")
