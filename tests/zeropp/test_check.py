"""Configurations that ZeRO++ refuses, and the rows of its keys elsewhere."""

import pytest
from distributed.cells.layouts import BASE
from distributed.cells.run import RankFailed, Ranks

from gptlite.checkpoint.compare import Effect, effect_of
from gptlite.config import load
from gptlite.errors import ConfigError

ZERO3 = "parallelism.zero=3", "parallelism.data=4"
ON = "parallelism.zeropp.weights=int8"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("parallelism.zero=2", "parallelism.zero=2"),
        ("parallelism.compression=int8", "parallelism.compression=int8"),
        ("parallelism.data=1", "each data rank holds all parameters"),
        ("parallelism.data=4 parallelism.dp_replicate=4", "each data rank holds all parameters"),
        (
            "parallelism.offload=nvme parallelism.offload_path=/tmp parallelism.offload_parameters=true",
            "parallelism.offload_parameters=true",
        ),
        ("parallelism.zeropp.node_size=3", "parallelism.zeropp.node_size=3 does not divide the 4 ranks"),
        ("parallelism.zeropp.node_size=0", "parallelism.zeropp.node_size=0"),
        (
            "parallelism.zeropp.secondary=true parallelism.pipeline=2 parallelism.schedule=zbv",
            "parallelism.zeropp.secondary=true with parallelism.schedule=zbv",
        ),
    ],
)
def test_refusals_name_the_keys(words: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "data.micro_batch_size=6", *ZERO3, ON, *words.split()])
    message = str(caught.value)
    assert names in message
    assert "parallelism.zeropp." in message
    assert "\n" not in message
    assert "; use " in message or "; try " in message or "; null" in message


def test_a_plan_is_not_made_for_what_no_layout_allows():
    with pytest.raises(ConfigError, match=r"weights=int8 with parallelism.compression=int8: both replace"):
        load([*BASE, "parallelism=auto", ON, "parallelism.compression=int8"])


def test_experts_are_refused():
    with pytest.raises(ConfigError, match=r"parallelism.zeropp.weights=int8 with parallelism.expert=2"):
        load(["data=synthetic", "model=moe-lite", *ZERO3, ON, "parallelism.expert=2", "run.name=x", "run.dir=x"])


def test_all_options_at_once_are_named():
    with pytest.raises(ConfigError, match=r"weights=int8 parallelism.zeropp.secondary=true parallelism.zeropp.gra"):
        load([*BASE, ON, "parallelism.zeropp.secondary=true", "parallelism.zeropp.gradients=int4"])


def test_a_size_of_nodes_alone_changes_nothing():
    config = load([*BASE, *ZERO3, "data.micro_batch_size=12", "parallelism.zeropp.node_size=3"])
    assert config.parallelism.zeropp.node_size == 3


def test_the_number_of_ranks_may_refuse_the_size_of_nodes():
    config = load([*BASE, "parallelism.zero=3", "data.micro_batch_size=6", ON, "parallelism.zeropp.node_size=3"])
    with Ranks(2) as ranks, pytest.raises(RankFailed, match="node_size=3 does not divide the 2 ranks"):
        ranks.run("zeropp.cases:train", config, 1)


def test_effects_on_a_resumed_run():
    assert effect_of("parallelism.zeropp.weights") is Effect.changes_numbers
    assert effect_of("parallelism.zeropp.node_size") is Effect.changes_numbers
    assert effect_of("parallelism.zeropp.secondary") is Effect.safe
