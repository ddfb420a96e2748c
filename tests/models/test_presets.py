"""The model presets against the sizes that were published, and against the table in docs/models.md."""

from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from gptlite.config import load
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.gpt.spec import GPTSpec
from gptlite.optimizer.config import MuonConfig
from gptlite.satellites.huggingface.adapters import BUILT_IN
from gptlite.satellites.plan.parameters import num_parameters

ROOT = Path(__file__).parents[2]
UNITS = {"M": 1e6, "B": 1e9}

GPT2_RELEASED = 124_439_808  # numel of the released weights
ROWS = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "models.md").read_text().splitlines()
    if line.startswith("| `")
]
TABLE, IMPORTED = ([row for row in ROWS if len(row) == columns] for columns in (9, 5))
OUR_OWN = {"gpt-lite", "gpt-lite-modern", "moe-lite"}
SPEEDRUN = "modded-nanogpt"


@cache
def preset(name: str) -> GPTConfig:
    ConfigStore.instance().store(group="model", name="gpt_schema", node=GPTConfig)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose(overrides=[f"+model={name}"]))
    assert isinstance(config, dict)
    return config["model"]


def count(config: GPTConfig) -> int:
    """Parameters of a tied GPT with biases and learned positions, at the unpadded vocabulary."""
    assert config.tied_embeddings
    assert config.bias
    assert config.vocab_size is not None
    d, ffn = config.d_model, config.ffn_size
    attention = (3 * d * d + 3 * d) + (d * d + d)
    mlp = (d * ffn + ffn) + (ffn * d + d)
    embeddings = (config.vocab_size + config.sequence_length) * d
    return config.num_layers * (attention + mlp + 2 * 2 * d) + embeddings + 2 * d


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_preset_is_its_row_of_the_table(row):
    config = preset(row[0])
    total, published = count(config), float(row[6][:-1]) * UNITS[row[6][-1]]
    shown = [config.name, config.num_layers, config.num_heads, config.d_model, config.sequence_length, f"{total:,}"]
    assert row[:6] == [str(value) for value in shown]
    assert row[7] == f"{total / published - 1:+.1%}"
    assert float(row[8]) == config.peak_lr
    assert config.d_model == config.num_heads * config.head_width
    assert abs(total / published - 1) < 0.02 or not row[0].startswith("gpt")


def test_gpt2_has_as_many_parameters_as_the_release():
    assert count(preset("gpt2")) == GPT2_RELEASED


def test_the_yaml_comment_states_the_count():
    for name, *_ in TABLE:
        assert f"# {count(preset(name)):,} parameters" in (ROOT / "conf" / "model" / f"{name}.yaml").read_text()


def test_gpt3_small_is_gpt2_with_twice_the_positions():
    gpt2, small = asdict(preset("gpt2")), asdict(preset("gpt3-small"))
    assert {key for key in gpt2 if gpt2[key] != small[key]} == {"name", "sequence_length"}


def test_the_table_has_every_published_preset():
    published = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - OUR_OWN - {SPEEDRUN}
    assert published == {row[0] for row in (*TABLE, *IMPORTED)}


@pytest.mark.parametrize("row", IMPORTED, ids=lambda row: row[0])
def test_an_imported_preset_has_the_parameters_of_its_class(row):
    name, _, kind, parameters, published = row
    config = preset(name)
    (adapter,) = (each for each in BUILT_IN[GPTSpec] if not each.differences(config))
    assert adapter.model_class == kind
    with torch.device("meta"):
        ours = GPT(config)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**adapter.to_json(config, "float32", None)))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert [f"{size:,}" for size in (*sizes, num_parameters(config))] == [parameters] * 3
    assert sizes[0] == pytest.approx(float(published[:-1]) * UNITS[published[-1]], rel=0.02)
    assert f"{parameters} parameters" in (ROOT / "conf" / "model" / f"{name}.yaml").read_text()


def test_the_speed_record_has_the_sources_parameters_and_trains_with_muon():
    run = load([f"model={SPEEDRUN}"])
    assert isinstance(run.model, GPTConfig)
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in GPT(run.model).parameters())
    matrices, table = 12 * (4 * 768 * 768 + 2 * 768 * 3072), 50304 * 768
    assert total == num_parameters(run.model) == matrices + 2 * table + 2 * 11
    for text in (ROOT / "conf" / "model" / f"{SPEEDRUN}.yaml", ROOT / "docs" / "models.md"):
        assert f"{total:,} parameters" in text.read_text()
    assert isinstance(run.optimizer, MuonConfig)
    assert run.optimizer.lr * 0.2 * 768**0.5 == pytest.approx(0.02, rel=0.01)
    assert (run.model.softcap, run.model.head_width) == (30.0, 128)
