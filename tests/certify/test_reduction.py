"""Reduction of a model and a batch: small, with all kinds of blocks, heads shared as before, and legal."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from marking import marked
from models import resnet  # noqa: F401  the examples, as plug-ins

from gptlite.config import load
from gptlite.config.checks import check
from gptlite.errors import ConfigError
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model, spec_of
from gptlite.models.spec import ModelSpec
from gptlite.parallelism.layout import wanted_world
from gptlite.satellites.certify.reduction import ReducedRuns, compresses, dense, reduce
from gptlite.satellites.certify.shrink import built, kinds

SYNTHETIC = ("data=synthetic", "data.micro_batch_size=1", "data.global_batch_size=256", "parallelism.data=16")


def reduced(*overrides: str) -> ReducedRuns:
    config = load([*SYNTHETIC, *overrides])
    return reduce(config, wanted_world(config.parallelism, gpus=0))


PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
QUICK = ["moe-lite", "qwen3-0.6b", "modded-nanogpt"]


@pytest.mark.parametrize("name", marked([*QUICK, *sorted({*PRESETS} - {*QUICK})], quick=len(QUICK), slow=99))
def test_a_preset_becomes_small_and_keeps_its_structure(name):
    """Of any preset, on a layout with all axes that it can have."""
    config = load([f"model={name}", *SYNTHETIC, "parallelism.pipeline=4", "parallelism.zero=1"])
    heads = config.model.num_kv_heads
    tensor = 2 if heads % 2 == 0 else 1
    runs = reduced(f"model={name}", "parallelism.pipeline=4", f"parallelism.tensor={tensor}", "parallelism.zero=1")
    small, spec = runs.base.model, spec_of(runs.base.model)
    assert sum(each.numel() for each in built(spec, small).parameters()) < 300_000
    for world in runs.worlds:
        check(runs.of(world.parallelism))
    check(runs.alone)
    assert (small.num_heads > small.num_kv_heads) == (config.model.num_heads > config.model.num_kv_heads)
    assert small.tied_embeddings == config.model.tied_embeddings
    assert bool(small.moe.experts) == bool(config.model.moe.experts)
    for key in ("position", "norm", "mlp", "bias", "qk_norm", "value_residual"):
        assert getattr(small, key) == getattr(config.model, key)


@pytest.mark.parametrize(
    ("tensor", "kv_heads", "small"),
    [(8, 8, (4, 2)), (16, 8, (4, 1)), (2, 8, (8, 4)), (1, 8, (4, 2))],
)
def test_heads_are_shared_by_heads_and_ranks_as_before(tensor, kv_heads, small):
    """16 ranks share 8 key heads in pairs: two ranks share one."""
    runs = reduced(
        "model=llama3-8b", f"model.kv_heads={kv_heads}", "model.num_layers=2", f"parallelism.tensor={tensor}"
    )
    assert (runs.base.model.num_heads, runs.base.model.kv_heads) == small


def test_every_kind_of_block_stays():
    every = "model=moe-lite", "model.num_layers=12", "model.moe.every=3"
    assert reduced(*every).model.blocks == (12, 3)
    windows = "model=gpt-lite", "model.num_layers=12", "model.windows=[32,32,0,64]"
    runs = reduced(*windows, "model.sequence_length=128")
    assert runs.model.blocks == (12, 4)
    assert runs.base.model.windows == [5, 5, 0, 10]
    spec = spec_of(runs.base.model)
    assert len(kinds(spec, runs.base.model)) == 3


@pytest.mark.parametrize(
    ("layout", "layers", "small"),
    [
        ("pipeline=2", 8, 4),  # two blocks of a stage
        ("pipeline=2", 2, 2),
        ("pipeline=3", 7, 7),  # uneven stages
        ("pipeline=2 schedule=interleaved_1f1b", 48, 8),  # four stages
        ("pipeline=2 bucket_layers=4", 48, 6),
        ("tensor=2", 48, 2),
    ],
)
def test_blocks_keep_the_boundaries_of_stages(layout, layers, small):
    keys = [f"parallelism.{each}" for each in layout.split()]
    assert reduced("model=gpt-lite", f"model.num_layers={layers}", *keys).model.blocks == (layers, small)


def test_an_uneven_vocabulary_stays_uneven():
    uneven = "model.vocab_multiple=1", "parallelism.tensor=4", "data.vocab_size=50257"
    model = reduced("model=gpt-lite", *uneven)
    assert (model.base.data.vocab_size, model.base.model.vocab_multiple) == (61, 1)
    padded = reduced("model=gpt-lite", "parallelism.tensor=4", "data.vocab_size=50257")
    assert (padded.base.data.vocab_size, padded.base.model.vocab_multiple) == (61, 4)


def test_all_runs_have_as_many_micro_batches():
    runs = reduced("model=gpt-lite", "parallelism.tensor=4", "parallelism.pipeline=4", "parallelism.zero=2")
    configs = [runs.alone, *(runs.of(world.parallelism) for world in runs.worlds)]
    batches = {each.data.global_batch_size for each in configs}
    counts = {each.data.global_batch_size // each.data.micro_batch_size // each.parallelism.data for each in configs}
    assert (len(batches), counts) == (1, {runs.micro_batches})


def test_what_is_not_covered_is_listed():
    lines = reduced("model=gpt-lite", "parallelism.tensor=4", "precision=fp8", "trainer.compile=true").uncovered
    assert "precision=fp8: fp32 is compared" in lines
    assert "trainer.compile=true: blocks are not compiled" in lines
    assert any(line.startswith("NCCL") for line in lines)


def test_a_resnet_keeps_its_blocks_and_a_hugging_face_model_its_groups():
    resnet18 = ["plugins=[examples.resnet]", "model=resnet18", "model.norm=group", "data=fake_images"]
    config = load([*resnet18, "parallelism.data=16", "parallelism.zero=3"])
    runs = reduce(config, 16)
    assert (runs.base.model.width, runs.base.model.blocks) == (8, 2)
    assert [world.ranks for world in runs.worlds] == [2, 3]


@dataclass
class LargeConfig(ModelConfig):
    peak_lr: float = 0.1
    size: int = 6000


class LargeSpec(ModelSpec):
    name, schema, reads = "large", LargeConfig, "tokens"

    def build(self, config, ops, seed):
        return torch.nn.Linear(config.size, config.size)


def test_a_large_model_without_known_keys_is_refused_in_one_line():
    register_model(LargeSpec())
    layout = "model=large", "parallelism.data=2", *SYNTHETIC[:3], "data.sequence_length=16"
    with pytest.raises(ConfigError, match=r"36,006,000 parameters.*define `reduced` in its spec") as refused:
        reduce(load(layout), 2)
    assert "\n" not in str(refused.value)
    assert reduce(load([*layout, "model.size=100"]), 2).model.changed == {}


def test_parity_is_of_dense_sums():
    """Also of a 1-bit optimizer, whose momenta are exchanged as signs after its warm-up."""
    runs = reduced("model=gpt-lite", "optimizer=onebit_adam")
    assert compresses(runs.base)
    assert (runs.base.optimizer.freeze_step, dense(runs.base).optimizer.freeze_step) == (2, 9)
    quantised = reduced("model=gpt-lite", "parallelism.zero=1", "parallelism.compression=int8").base
    assert compresses(quantised)
    assert not compresses(dense(quantised))
