"""`parallelism.data=elastic`: the keys that it stands for, what it refuses, and the layouts that it allows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gptlite.commands.certify import configured
from gptlite.commands.plan import planned_config
from gptlite.config import Config, load
from gptlite.config.batch import check_world
from gptlite.config.compose import with_elastic
from gptlite.data.batch_loader import Batch, Share
from gptlite.data.batches import batch_schedule
from gptlite.data.config import DatasetConfig
from gptlite.data.loader import HeldOut, Loader
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError
from gptlite.ops.inputs import IGNORE
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import largest_micro_batch
from gptlite.satellites.elastic.degree import largest, smallest, too_few
from gptlite.satellites.engine.settings import compose

BASE = "model=gpt-lite data=synthetic run.dir=unused run.name=x".split()
ELASTIC = ParallelismConfig(elastic=True)


def elastic(*overrides: str) -> Config:
    return load([*BASE, "parallelism.data=elastic", *overrides])


def test_elastic_stands_for_two_keys():
    both = ["parallelism.elastic=true", "parallelism.data=null"]
    assert with_elastic(["a=b", "parallelism.data=elastic", "c=d"]) == ["a=b", *both, "c=d"]
    assert with_elastic(["parallelism.data='Elastic'"]) == both
    others = ["parallelism.data=4", "parallelism.data=null", "parallelism.data=1,2", "parallelism.data=range(1,4)"]
    assert with_elastic(others) == others
    # A preset's degree gives way.
    layout = elastic("parallelism=tp2_pp2_dp2").parallelism
    assert (layout.elastic, layout.data, layout.tensor) == (True, None, 2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("parallelism.data=elastc", "neither a number of data ranks nor elastic nor null; did you mean elastic?"),
        ("parallelism.data=elastic,4", "parallelism.elastic=true,false"),
        ("parallelism.elastic=true parallelism.data=4", "parallelism.elastic=true with parallelism.data=4: "),
        ("parallelism=auto parallelism.data=elastic", "with parallelism=auto"),
        ("parallelism.data=elastic optimizer=sgd optimizer.adascale=true", "with optimizer.adascale=true"),
        (
            "parallelism.data=elastic trainer.noise_scale=true data.batch_ramp=[4,4]",
            "with data.batch_ramp=[4, 4]: the batch would depend on the number of ranks",
        ),
    ],
)
def test_what_contradicts_elastic_is_refused_in_one_line(overrides: str, says: str):
    with pytest.raises(ConfigError) as refusal:
        load([*BASE, *overrides.split()])
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_for_one_number_of_ranks_refuses_elastic():
    with pytest.raises(ConfigError, match="a plan is for one number of ranks"):
        planned_config([*BASE, "parallelism=zero2", "parallelism.data=elastic"])
    with pytest.raises(ConfigError, match=r"certify each, e\.g\. with parallelism\.elastic=false"):
        configured([*BASE, "parallelism.data=elastic"])
    with pytest.raises(ConfigError, match=r"with gptlite\.initialize: a program divides its batches itself"):
        compose(torch.nn.Linear(2, 2), "adamw", ["parallelism.data=elastic"])


def test_a_file_writes_elastic_as_its_key(tmp_path: Path):
    preset = tmp_path / "experiment" / "mine.yaml"
    preset.parent.mkdir()
    preset.write_text("# @package _global_\nparallelism:\n  data: elastic\n")
    with pytest.raises(ConfigError, match=r"^parallelism\.data: .*; in a file, write elastic: true$"):
        load([*BASE, "experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"])
    preset.write_text("# @package _global_\nparallelism:\n  elastic: true\n")
    assert load([*BASE, "experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"]).parallelism.elastic


# Ranks of the largest layout on 0, 1, 2, ... ranks.
LARGEST = [
    ("data.global_batch_size=8", [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]),
    ("data.global_batch_size=8 parallelism.tensor=2", [0, 0, 2, 2, 4, 4, 6, 6, 8]),
    ("data.global_batch_size=8 parallelism.tensor=2 parallelism.pipeline=2", [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]),
    # Four data ranks run three micro-batches each, and five only two, fewer than the pipeline needs.
    (
        "data.global_batch_size=9 data.micro_batch_size=1 parallelism.pipeline=3",
        [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12, 12],
    ),
    # Rounds of two micro-batches cannot take 5.
    (
        "data.global_batch_size=10 data.micro_batch_size=1 parallelism.pipeline=2 parallelism.schedule=zero_bubble",
        [0, 0, 2, 2, 2, 2, 6, 6, 8],
    ),
    ("model=moe-lite parallelism.expert=2 parallelism.zero=3", [0, 0, 2, 2, 4, 4, 6, 6, 8]),
    ("parallelism.dp_replicate=2 parallelism.zero=2", [0, 0, 2, 2, 4, 4, 6]),
    ("data.global_batch_size=8 data.batch_ramp=[2,2,100]", [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]),
    ("data.global_batch_size=8 parallelism.deterministic=true precision=fp32", [0, 1, 2, 3, 4, 5]),
    ("data.global_batch_size=8 trainer.noise_scale=true data.micro_batch_size=8", [0, 0, 2, 3, 4]),
    ("parallelism.zero=3 parallelism.zeropp.weights=int8 parallelism.zeropp.node_size=2", [0, 0, 2, 2, 4, 4, 6]),
]


@pytest.mark.parametrize(("overrides", "ranks"), LARGEST, ids=[overrides for overrides, _ in LARGEST])
def test_the_largest_legal_layout(overrides: str, ranks: list[int]):
    config = elastic(*overrides.split())
    assert [largest(config, world) for world in range(len(ranks))] == ranks
    assert smallest(config) == next(filter(None, ranks))
    for world in filter(None, ranks):
        assert check_world(config, world).world_size == world


def test_without_elastic_a_batch_must_be_divided_as_before():
    config = load([*BASE, "data.global_batch_size=8", "parallelism.zero=1"])
    assert [largest(config, world) for world in range(9)] == [0, 1, 2, 2, 4, 4, 4, 4, 8]
    with pytest.raises(ConfigError, match="has no integer solution for accumulation"):
        check_world(config, 3)


def test_samples_of_a_dataset_have_no_fillers():
    config = replace(elastic(), data=DatasetConfig(global_batch_size=8))
    assert [largest(config, world) for world in range(9)] == [0, 1, 2, 2, 4, 4, 4, 4, 8]


def test_too_few_ranks_are_told_what_to_add_and_how_to_go_on():
    line = too_few(elastic("parallelism.tensor=2", "parallelism.pipeline=2", "run.dir=some where"), 3)
    assert line.startswith("parallelism.tensor=2 parallelism.pipeline=2 needs 4 ranks, but only 3 are left; go on")
    assert line.endswith("run.dir='some where'\"'\"''") or "run.dir=" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("batches", "data", "size"),
    [
        ([8], 1, 8), ([8], 2, 4), ([8], 4, 2), ([64], 2, 16),  # as without fillers
        ([8], 3, 3), ([10], 3, 4), ([32], 7, 5), ([48], 5, 10),
        ([4, 8], 3, 1), ([6, 8], 3, 1), ([5, 10], 4, 1), ([2, 6], 4, 1),
    ],
)  # fmt: skip
def test_the_micro_batch_is_the_largest_with_the_fewest_fillers(batches: list[int], data: int, size: int):
    assert largest_micro_batch(ELASTIC, batches, data) == size
    fillers = {n: sum(-batch % (n * data) for batch in batches) for n in range(1, 17)}
    assert fillers[size] == min(fillers.values())


def loader(share: Share, micro: int, batch: int, ramp: list[int] | None = None) -> Loader:
    tokens = np.arange(1000, dtype=np.uint16) % 50
    stream = SampleStream.begin(7, 4, {"x": ("x", tokens, 1.0)})
    held_out = HeldOut({"x": tokens}, np.ones(50, dtype=np.int64), {"x": None})
    schedule = batch_schedule(batch, ramp)
    return Loader(stream, held_out, schedule=schedule, micro_batch_size=micro, device=torch.device("cpu"), share=share)


def batches(of: Loader, consumed: int) -> list[Batch]:
    return [of.batch(consumed, index) for index in range(of.micro_batches(consumed))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_every_sample_is_read_once_by_any_number_of_ranks_in_the_same_order(ranks: int, micro: int):
    alone = loader(Share(), 10, 10)
    every = [loader(Share(rank, ranks), micro, 10) for rank in range(ranks)]
    for consumed in (0, 10, 20):
        (whole,) = batches(alone, consumed)
        parts = [batches(each, consumed) for each in every]
        assert len({len(each) for each in parts}) == 1  # all ranks run the same collectives
        order = [part for step in zip(*parts, strict=True) for part in step]
        ids, tokens, targets = (torch.cat([getattr(each, name) for each in order])
                                for name in ("sample_ids", "tokens", "targets"))  # fmt: skip
        real = ids >= 0
        assert ids[real].tolist() == list(range(consumed, consumed + 10))
        assert real.tolist() == [True] * 10 + [False] * (len(ids) - 10)
        assert torch.equal(tokens[real], whole.tokens)
        assert torch.equal(targets[real], whole.targets)
        assert (targets[~real] == IGNORE).all()
        assert torch.equal(tokens[~real], whole.tokens[:1].expand(len(ids) - 10, -1))
    for each in (alone, *every):
        each.close()


def test_a_growing_batch_has_fillers_where_it_needs_them():
    of = [loader(Share(rank, 3), 2, 8, [4, 4, 8]) for rank in range(3)]
    assert [of[0].micro_batches(consumed) for consumed in (0, 4, 8)] == [1, 1, 2]
    assert [each.sample_ids.tolist() for each in batches(of[2], 0)] == [[~0, ~0]]
    assert [each.sample_ids.tolist() for each in batches(of[0], 8)] == [[8, 9], [14, 15]]
    assert [each.sample_ids.tolist() for each in batches(of[2], 8)] == [[12, 13], [~8, ~8]]
    for each in of:
        each.close()
