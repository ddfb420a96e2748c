"""Reduction of layouts to worlds of at most nine ranks in which each pair of axes meets."""

from itertools import combinations, product

import pytest

from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.certify.worlds import MOST_RANKS, World, axes_of, cover, thirds, world_of

DEGREES = tuple(product((1, 2, 4, 9), (1, 2, 3, 8), (1, 4), (1, 2, 6, 64), (1, 2), (1, 2, 4), (0, 1, 3)))


def legal(world: World) -> bool:
    try:
        resolve(world.parallelism, world.ranks)
    except ConfigError:
        return False
    return True


def layouts() -> list[ParallelismConfig]:
    """Those that resolve, of all combinations."""
    found = []
    for pipeline, tensor, context, data, copies, expert, zero in DEGREES:
        config = ParallelismConfig(
            pipeline=pipeline, tensor=tensor, context=context, data=data, dp_replicate=copies, expert=expert, zero=zero
        )
        try:
            resolve(config, pipeline * tensor * context * data)
        except ConfigError:
            continue
        found += [config] if pipeline * tensor * context * data > 1 else []
    return found


def covered(config: ParallelismConfig) -> tuple[tuple, list[World], list]:
    world = config.pipeline * config.tensor * config.context * (config.data or 1)
    axes = axes_of(config, resolve(config, world))
    return axes, *cover(axes, lambda some: world_of(config, some), legal)


def test_each_pair_of_axes_of_each_layout_meets_in_a_world_of_nine_ranks():
    every = layouts()
    assert len(every) > 500
    for config in every:
        axes, worlds, missing = covered(config)
        assert missing == [], config
        assert all(world.ranks <= MOST_RANKS and legal(world) for world in worlds)
        for pair in combinations([axis.name for axis in axes], 2):
            assert any(set(pair) <= set(world.names) for world in worlds), (config, pair)


def test_every_axis_of_a_layout_is_on_and_every_other_is_off():
    for config in layouts():
        axes, worlds, _ = covered(config)
        names = {axis.name for axis in axes}
        expected = {key for key in ("pipeline", "tensor", "context", "expert") if getattr(config, key) > 1}
        assert names - {"data", "replicate"} == expected
        for world in worlds:
            on = {key for key in ("pipeline", "tensor", "context", "expert") if getattr(world.parallelism, key) > 1}
            assert on == set(world.names) - {"data", "replicate"}
            assert world.parallelism.zero == config.zero


@pytest.mark.parametrize(("degree", "reduced"), [(2, 2), (3, 3), (4, 2), (5, 3), (6, 2), (64, 2)])
def test_an_odd_degree_becomes_three_and_an_even_one_two(degree, reduced):
    config = ParallelismConfig(tensor=degree, data=1)
    (axis,), (world,), _ = covered(config)
    assert (axis.true, axis.degree, world.parallelism.tensor) == (degree, reduced, reduced)


def test_three_axes_need_one_world_and_four_need_three():
    _, worlds, _ = covered(ParallelismConfig(pipeline=4, tensor=4, data=16, zero=2))
    assert [world.ranks for world in worlds] == [8]
    _, worlds, _ = covered(ParallelismConfig(pipeline=4, tensor=4, context=2, data=16, zero=2))
    assert [world.ranks for world in worlds] == [8, 8, 4]


def test_experts_that_data_ranks_hold_once_need_no_ranks_of_their_own():
    _, worlds, _ = covered(ParallelismConfig(data=8, expert=8))
    assert [(world.ranks, world.parallelism.expert) for world in worlds] == [(2, 2)]
    _, worlds, _ = covered(ParallelismConfig(data=8, expert=4))  # each expert is on two data ranks
    assert [(world.ranks, world.parallelism.expert) for world in worlds] == [(4, 2)]


def test_options_of_axes_follow_their_degrees():
    config = ParallelismConfig(tensor=4, data=4, sequence=True, zero=3, dp_replicate=2, bucket_layers=8)
    for world in covered(config)[1]:
        assert world.parallelism.sequence == ("tensor" in world.names)
        assert world.parallelism.dp_replicate == (2 if "replicate" in world.names else 1)
        assert world.parallelism.bucket_layers == 2


def test_a_stage_in_the_middle_and_uneven_shards_need_three_ranks():
    config = ParallelismConfig(pipeline=4, data=16, zero=2)
    axes = axes_of(config, resolve(config, 64))
    assert [world.names for world in thirds(config, axes, uneven=False)] == [("pipeline",)]
    assert [world.ranks for world in thirds(config, axes, uneven=True)] == [3, 3]
    interleaved = ParallelismConfig(pipeline=4, schedule="interleaved_1f1b", data=1)  # four stages on two ranks
    assert thirds(interleaved, axes_of(interleaved, resolve(interleaved, 4)), uneven=False) == []
    odd = ParallelismConfig(pipeline=3, data=1)
    assert thirds(odd, axes_of(odd, resolve(odd, 3)), uneven=False) == []
