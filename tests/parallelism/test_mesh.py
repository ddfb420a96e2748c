"""A rank's place on the axes."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from gptlite.parallelism.axes import AXES
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.process_group import join_alone

CPU = torch.device("cpu")
SIZES = (2, 2, 3, 2)  # pp, dp_replicate, dp_shard, tp


def test_ranks_are_counted_with_the_last_axis_fastest():
    places = list(product(*(range(size) for size in SIZES)))
    for rank, place in enumerate(places):
        mesh = Mesh(CPU, Layout(SIZES), rank)
        assert tuple(mesh.coordinate(axis) for axis in AXES) == place
        assert [mesh.size(axis) for axis in AXES] == list(SIZES)
        assert mesh.is_main is (rank == 0)
        assert mesh.world_size == len(places) == 24


def test_data_parallel_parts_span_replicate_and_shard():
    meshes = [Mesh(CPU, Layout(SIZES), rank) for rank in range(24)]
    assert {mesh.data_size for mesh in meshes} == {6}
    for mesh in meshes:
        assert mesh.data_rank == mesh.coordinate("dp_replicate") * 3 + mesh.coordinate("dp_shard")
    # Ranks that differ in another axis alone read the same data.
    by_place: dict[tuple[int, ...], set[int]] = {}
    for mesh in meshes:
        by_place.setdefault((mesh.coordinate("pp"), mesh.coordinate("tp")), set()).add(mesh.data_rank)
    assert all(parts == set(range(6)) for parts in by_place.values())
    assert len(by_place) == 4


@pytest.mark.parametrize("sizes", [(2, 2, 6, 2), (2, 12, 1, 2)], ids=["shards", "copies"])
def test_ranks_that_share_sequences_are_neighbours_and_read_the_same_samples(sizes):
    meshes = [Mesh(CPU, Layout(sizes, (3,)), rank) for rank in range(48)]
    assert {(mesh.data_size, mesh.fsdp_size, mesh.size("cp")) for mesh in meshes} == {(4, 12, 3)}
    for tp, line in product(range(2), range(8)):
        its = meshes[6 * line + tp : 6 * line + 6 : 2]
        assert [mesh.coordinate("cp") for mesh in its] == [0, 1, 2]
        assert len({(mesh.data_rank, mesh.coordinate("pp"), mesh.coordinate("tp")) for mesh in its}) == 1
    assert {mesh.data_rank for mesh in meshes} == {0, 1, 2, 3}


@pytest.mark.parametrize(("has_gpu", "device"), [(False, "cpu"), (True, "cuda:0")])
def test_a_single_process_has_a_mesh_of_one_rank(monkeypatch, has_gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    mesh = build_mesh(ParallelismConfig())
    assert mesh.device == torch.device(device)
    assert (mesh.world_size, mesh.rank, mesh.data_size, mesh.data_rank, mesh.is_main) == (1, 0, 1, 0, True)


@pytest.mark.parametrize(("has_gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_a_group_of_one(monkeypatch, has_gpu, backend):
    given = {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    join_alone(60.0)
    assert (given["backend"], given["rank"], given["world_size"]) == (backend, 0, 1)
