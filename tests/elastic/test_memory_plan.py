"""Keys and predicted cost of checkpoints in memory."""

from __future__ import annotations

import pytest

from gptlite.config import load
from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.errors import ConfigError
from gptlite.parallelism.layout import resolve
from gptlite.satellites.elastic.copies import partner
from gptlite.satellites.elastic.shelf import COPIES
from gptlite.satellites.plan.in_memory import VERSIONS, InMemory
from gptlite.satellites.plan.planning import workload_of

SMALL = ["data=synthetic", "data.vocab_size=128", "model=gpt-lite", "model.num_layers=1", "run.dir=unused"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["memory_interval=-1"], "checkpoint.memory_interval=-1 must not be negative; 0 turns it off"),
        (["replicas=-1", "memory_interval=1"], "checkpoint.replicas=-1 must not be negative; 0 turns it off"),
        (
            ["replicas=1", "memory_interval=0"],
            "but checkpoint.memory_interval=0 keeps none; leave checkpoint.memory_interval ",
        ),
        (["replicas=2", "memory_interval=5", "../cluster.nodes=2"], "but cluster.nodes=2; use checkpoint.replicas=1"),
    ],
)
def test_a_wrong_key_is_refused_in_one_line(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as error:
        load([*SMALL, *(f"checkpoint.{each}".replace("checkpoint.../", "") for each in overrides)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_cost_is_that_of_the_state_each_element_once():
    config = load([*SMALL, "checkpoint.memory_interval=10", "checkpoint.replicas=1", "parallelism.zero=0"])
    cluster = ClusterConfig(device="cuda", nodes=2, devices_per_node=2, host_memory_gib=1, inter=LinkConfig(1.0))
    cost = InMemory.of(workload_of(config, resolve(config.parallelism, 4), cluster), 1, cluster)
    count = 128 * 256 + 256 * 256 + 12 * 256**2 + 13 * 256 + 2 * 256  # embeddings, positions, a block, the last norm
    assert VERSIONS == COPIES
    assert cost.sent == pytest.approx(12 * count / 2)
    assert cost.held == pytest.approx(2 * COPIES * cost.sent)
    assert cost.seconds == pytest.approx(cost.sent / 2e9)  # two devices with a link of 1 GB/s each
    assert "too much" not in cost.words(10, cluster, 1.0)
    tight = ClusterConfig(device="cuda", host_memory_gib=0.01)
    assert "too much for cluster.host_memory_gib=0.01: use more nodes" in cost.words(10, tight, 1.0)


def test_partners_are_on_other_nodes_and_share_the_copies_evenly():
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert [partner(nodes, rank, 1) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [partner(nodes, rank, 2) for rank in range(6)] == [4, 5, 0, 1, 2, 3]
    uneven = ["a", "b", "a", "b", "a"]
    assert [partner(uneven, rank, 1) for rank in range(5)] == [1, 0, 3, 2, 1]


def test_copies_alone_keep_checkpoints_every_ten_steps():
    steps = [load([*SMALL, *more]).checkpoint.memory_steps for more in ([], ["checkpoint.replicas=1"])]
    assert steps == [0, 10]
