"""The largest model that fits: the next layer does not, by the plan's own count of the whole model."""

import shlex
from dataclasses import replace

import pytest

from gptlite.commands.plan import planned_config
from gptlite.config import load
from gptlite.config.cluster import ClusterConfig
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.satellites.plan.capacity import GIB, rank_memory
from gptlite.satellites.plan.largest import largest_models
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.planning import fixed_keys, limited, make_plan
from gptlite.satellites.plan.report import report_largest, train_command

GIVEN = [
    "model=gpt-lite",
    "data=synthetic",
    "data.vocab_size=300",
    "data.global_batch_size=8",
    "model.d_model=128",
    "precision=fp32",
]
NODE = ["cluster=dgx-h100", "cluster.devices_per_node=4", "cluster.memory_gib=3"]


def silent(text):
    pass


def config_of(*given):
    return planned_config([*GIVEN, *given])


def test_the_largest_fits_and_one_more_layer_does_not():
    cluster, found = largest_models(config_of(*NODE), silent)
    assert len(found) > 8
    assert [each.layers for each in found] == sorted((each.layers for each in found), reverse=True)
    for each in found:
        assert each.work.model.d_model == 128
        assert most(each.work)[1].total == each.memory.total <= each.room == rank_memory(cluster, 4)
        deeper = replace(each.work, model=replace(each.work.model, num_layers=each.layers + 1))
        assert most(deeper)[1].total > each.room
    by_layout = {(each.work.parallelism.data, each.work.parallelism.zero): each.layers for each in found}
    assert by_layout[4, 3] > 2 * by_layout[4, 0]  # cut over four ranks
    assert by_layout[4, 1] > 1.5 * by_layout[4, 0]


def test_the_command_composes_to_the_model_and_is_what_the_plan_finds():
    degrees = ("parallelism.zero=3", "parallelism.tensor=1", "parallelism.pipeline=1", "parallelism.offload=none")
    config = config_of(*NODE, "model.num_layers=2", *degrees)
    cluster, found = largest_models(config, silent)
    assert {each.work.parallelism.zero for each in found} == {3}
    (best, *_) = found
    words = shlex.split(train_command(config, cluster, best.work, best.override))[2:]
    trained = load([*words, *NODE])
    assert trained.model.num_layers == best.layers
    assert trained.parallelism.zero == 3
    assert words.count("model.num_layers=2") == 0
    text = report_largest(config, cluster, found, 5)
    assert f"{best.layers}" in text
    assert "vocabulary 300 (padded to" in text
    whole = replace(best.work.model, vocab_size=best.work.model.padded_vocab_size)
    assert "padded" not in spec_of(whole).words(whole)
    deeper = replace(trained, model=replace(trained.model, num_layers=best.layers + 1))
    deeper.run.overrides = [*words, *NODE, *degrees]
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(deeper, 4, silent)


def test_a_limit_of_host_memory_is_the_room_of_a_rank():
    cpu = ClusterConfig(name="cpu", device="cpu", devices_per_node=2, memory_gib=16.0, reserved_gib=0.5)
    config = config_of("trainer.host_memory_limit=1")
    assert rank_memory(limited(cpu, config, 2), 2) == rank_memory(limited(cpu, config, 1), 1) == 0.5 * GIB
    assert limited(cpu, config_of("trainer.host_memory_limit=64"), 1) == cpu  # no more than there is
    assert limited(replace(cpu, device="cuda"), config, 2).memory_gib == 16.0
    assert "zero" not in fixed_keys(config)


@pytest.mark.slow
def test_nothing_fits_is_said():
    with pytest.raises(ConfigError, match="fits one layer of gpt-lite"):
        largest_models(config_of("cluster=dgx-h100", "cluster.memory_gib=2.001"), silent)
