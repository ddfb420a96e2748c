"""A layout's arithmetic: the axes of a world, who holds which stage, and what torch's schedules can really run."""

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from gptlite.errors import ConfigError
from gptlite.parallelism.axes import AXES, CONTEXT
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import (
    MAX_MICRO_BATCH,
    SCHEDULES,
    Layout,
    accumulation,
    check_micro_batches,
    chunk_starts,
    divisors,
    largest_micro_batch,
    listed,
    num_stages,
    resolve,
    schedule_refuses,
    split_layers,
    stages_of_rank,
    wanted_world,
)

TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


@pytest.mark.parametrize(
    ("config", "world", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 6, (1, 6, 1, 1)),
        ({"tensor": 2}, 6, (1, 3, 1, 2)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 8, (2, 2, 1, 2)),
        ({"data": 4, "dp_replicate": 4}, 4, (1, 4, 1, 1)),
        ({"zero": 1}, 4, (1, 1, 4, 1)),
        ({"zero": 3, "dp_replicate": 2, "tensor": 2}, 24, (1, 2, 6, 2)),
        ({"zero": 2, "dp_replicate": 4}, 4, (1, 4, 1, 1)),
        # Ranks that share sequences hold copies, or shards with ZeRO, as data ranks do.
        ({"context": 2, "pipeline": 3, "zero": 3}, 12, (3, 1, 4, 1)),
        ({"context": 2, "tensor": 2}, 12, (1, 6, 1, 2)),
        ({"context": 4, "zero": 1, "dp_replicate": 2}, 16, (1, 2, 8, 1)),
        ({"context": 4, "zero": 2}, 4, (1, 1, 4, 1)),
    ],
)
def test_data_is_what_is_left_of_the_world(config, world, sizes):
    layout = resolve(ParallelismConfig(**config), world)
    context = config.get("context", 1)
    assert layout == Layout(sizes, (context,))
    assert layout.world_size == world
    assert layout.fsdp_size == sizes[1] * sizes[2]
    assert layout.data_size == world // (sizes[0] * context * sizes[3])
    assert [layout.size(axis) for axis in AXES] == list(sizes)
    assert layout.size(CONTEXT) == context


def test_a_layout_has_a_size_for_each_axis():
    with pytest.raises(ValueError, match="got 5 sizes for the 4 axes pp, dp_replicate, dp_shard, tp"):
        Layout((1, 1, 1, 1, 1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_that_share_a_sequence_have_as_many_keys_to_look_at(size):
    length = 48 * size
    chunk = length // (2 * size)
    starts = [chunk_starts(length, size, rank) for rank in range(size)]
    # All chunks, each on one rank, and an early one with a late one.
    assert sorted(start for pair in starts for start in pair) == list(range(0, length, chunk))
    seen = [sum(position + 1 for start in pair for position in range(start, start + chunk)) for pair in starts]
    assert set(seen) == {length * (length + 1) // 2 // size}


# More are in tests/config/test_checks_parallelism.py.
@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({"tensor": 8}, 4, "try parallelism.tensor=1, 2, 4, or 8 ranks"),
        ({"tensor": 3, "pipeline": 5}, 8, "has no integer solution for data; try 15 ranks"),
        ({"tensor": 4, "data": 2}, 2, "= 8; try parallelism.tensor=1, or 8 ranks"),
    ],
)
def test_an_impossible_world_is_refused_with_its_equation(config, world, message):
    with pytest.raises(ConfigError) as refusal:
        resolve(ParallelismConfig(**config), world)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_choice_that_a_refusal_names_would_do():
    for tensor, pipeline, world in product((1, 2, 3, 4, 6), (1, 2, 3), range(1, 13)):
        config = ParallelismConfig(tensor=tensor, pipeline=pipeline)
        if world % (tensor * pipeline) == 0:
            assert resolve(config, world).world_size == world
            continue
        with pytest.raises(ConfigError) as refusal:
            resolve(config, world)
        for part in str(refusal.value).split("; try ")[1].split(", or "):
            key, _, values = part.rpartition("=")
            for value in map(int, values.replace(" ranks", "").replace(" or ", ",").split(",")):
                fixed = vars(config) | {key.removeprefix("parallelism."): value} if key else vars(config)
                resolve(ParallelismConfig(**fixed), world if key else value)


@pytest.mark.parametrize(
    ("config", "gpus", "ranks"),
    [
        ({}, 0, 1),
        ({}, 8, 1),
        ({"spread": True}, 0, 2),
        ({"spread": True}, 1, 1),
        ({"spread": True}, 8, 8),
        ({"zero": 3}, 0, 2),
        ({"zero": 3}, 8, 8),
        ({"zero": 3, "tensor": 2}, 0, 4),
        ({"zero": 1, "tensor": 3}, 8, 6),
        ({"zero": 1, "tensor": 4}, 2, 4),
        ({"zero": 1, "data": 3}, 8, 3),
        ({"tensor": 2, "pipeline": 2}, 8, 4),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 0, 8),
        ({"zero": 3, "dp_replicate": 2}, 0, 4),
        ({"zero": 3, "dp_replicate": 2}, 7, 6),
        ({"dp_replicate": 3}, 0, 3),
        ({"dp_replicate": 3, "spread": True}, 8, 3),
    ],
)
def test_how_many_ranks_are_started(config, gpus, ranks):
    assert wanted_world(ParallelismConfig(**config), gpus) == ranks
    assert resolve(ParallelismConfig(**config), ranks).world_size == ranks


def pipelines():
    """Every schedule on 1 to 8 ranks, with the stages a rank that it can have."""
    for name, rule in SCHEDULES.items():
        for ranks, virtual in product((1, 2, 3, 4, 8), (rule.virtual,) if rule.fixed else (1, 2, 3)):
            yield ParallelismConfig(pipeline=ranks, schedule=name, virtual_stages=virtual)


def torch_schedule(config, micro_batches):
    """Rank 0's schedule, as torch builds it. Raises what torch raises."""
    count = num_stages(config)
    stages = [
        SimpleNamespace(group_size=config.pipeline, group_rank=0, num_stages=count, stage_index=index, submod=None)
        for index in stages_of_rank(config, 0)
    ]
    single = issubclass(TORCH[config.schedule], schedules.PipelineScheduleSingle)
    return TORCH[config.schedule](stages[0] if single else stages, micro_batches)


@pytest.mark.parametrize(
    "config", [c for c in pipelines() if c.pipeline > 1], ids=lambda c: f"{c.schedule}-{c.pipeline}-{c.virtual_stages}"
)
def test_what_is_accepted_is_what_torch_accepts(config):
    for micro_batches in range(1, 20):
        reason = schedule_refuses(config, micro_batches)
        try:
            torch_schedule(config, micro_batches)
        except ValueError:
            assert reason
        else:
            assert reason == ""


def test_stages_are_placed_where_torch_looks_for_them():
    for config in pipelines():
        places = {stage: rank for rank in range(config.pipeline) for stage in stages_of_rank(config, rank)}
        assert sorted(places) == list(range(num_stages(config)))
        if num_stages(config) > config.pipeline > 1:
            assert torch_schedule(config, config.pipeline).stage_index_to_group_rank == places


def test_which_schedules_split_the_backward_pass():
    for config in pipelines():
        if config.pipeline > 1:
            actions = torch_schedule(config, 8).pipeline_order[0]
            kinds = {action.computation_type for action in actions if action is not None}
            assert (schedules.BACKWARD_WEIGHT in kinds) == SCHEDULES[config.schedule].splits_backward


def test_without_a_pipeline_there_is_one_stage_and_any_number_of_micro_batches():
    for schedule, micro_batches in product(SCHEDULES, (1, 5, 7)):
        config = ParallelismConfig(schedule=schedule)
        check_micro_batches(config, micro_batches)
        assert (num_stages(config), stages_of_rank(config, 0)) == (1, [0])


@pytest.mark.parametrize(("layer_cost", "head_cost"), [(1, 0), (1, 0.5), (1, 1), (2, 7), (1, 100), (3.7, 1.9)])
def test_layers_are_split_as_well_as_any_split_can(layer_cost, head_cost):
    for layers in range(1, 10):
        for stages in range(1, layers + 1):
            split = split_layers(layers, stages, layer_cost, head_cost)
            assert [layer for stage in split for layer in stage] == list(range(layers))
            assert len(split) == stages
            assert all(split)
            assert most_expensive(split, layer_cost, head_cost) == pytest.approx(
                min(most_expensive(other, layer_cost, head_cost) for other in every_split(layers, stages))
            )


def every_split(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        yield [range(start, end) for start, end in zip((0, *cuts), (*cuts, layers), strict=True)]


def most_expensive(split, layer_cost, head_cost):
    costs = [len(stage) * layer_cost for stage in split]
    costs[-1] += head_cost
    return max(costs)


def test_no_stage_is_longer_than_it_has_to_be():
    assert [len(stage) for stage in split_layers(7, 3, 1, 0)] == [2, 2, 3]
    assert [len(stage) for stage in split_layers(8, 3, 1, 0.5)] == [3, 3, 2]
    assert [len(stage) for stage in split_layers(9, 4, 1, 1)] == [2, 2, 3, 2]
    assert [len(stage) for stage in split_layers(96, 8, 1, 0)] == [12] * 8


@pytest.mark.parametrize(
    ("config", "global_batch", "data", "micro"),
    [
        ({}, 16, 1, 16),
        ({}, 512, 1, 16),
        ({}, 24, 1, 12),
        ({}, 16, 8, 2),
        ({}, 16, 3, None),
        ({"pipeline": 2}, 16, 1, 8),
        ({"pipeline": 2}, 16, 2, 4),
        ({"pipeline": 4}, 16, 8, None),
        ({"pipeline": 2, "schedule": "gpipe"}, 16, 1, 16),
        ({"pipeline": 2, "schedule": "zero_bubble"}, 17, 1, None),
    ],
)
def test_a_micro_batch_left_open_is_the_largest_that_runs(config, global_batch, data, micro):
    config = ParallelismConfig(**config)
    assert largest_micro_batch(config, [global_batch], data) == micro
    able = [
        size
        for size in range(1, MAX_MICRO_BATCH + 1)
        if global_batch % (size * data) == 0 and not schedule_refuses(config, accumulation(global_batch, size, data))
    ]
    assert able[-1:] == ([] if micro is None else [micro])


def test_divisors_are_listed_in_words():
    assert [divisors(n) for n in (1, 12, 13, 16)] == [[1], [1, 2, 3, 4, 6, 12], [1, 13], [1, 2, 4, 8, 16]]
    assert (listed([1, 2, 4]), listed([1, 2, 4], "or"), listed([3], "or")) == ("1, 2, 4", "1, 2 or 4", "3")
