"""A training state saved on any layout is read by others: plain torch.distributed.checkpoint, and transformers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoint.conftest import bits
from marking import marked
from run_files import read_metrics
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import Config
from gptlite.config.saved import from_yaml
from gptlite.data.build import build_loader, prepare
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.ops.inputs import IGNORE
from gptlite.parallelism.rank_sync import ALONE
from gptlite.satellites.checkpoint_tool.huggingface import export
from gptlite.trainer.state import model_tensors

VOCABULARY, STEPS = 37, 2
# Rows that two ranks share unevenly, a head that is the embedding, and layers for the four parts of zbv. The rate is
# high, so that weights move.
RUN = f"""
data=synthetic data.vocab_size={VOCABULARY} data.num_tokens=2000 data.global_batch_size=8 data.micro_batch_size=2
model=gpt-lite
model.num_layers=4 model.num_heads=2 model.d_model=16 model.sequence_length=16 model.vocab_multiple=1 model.init_std=0.2
data.sequence_length=16 schedule=constant schedule.warmup_steps=1 optimizer.lr=3e-2 trainer.max_steps={STEPS}
trainer.eval_samples=8 trainer.sample_tokens=0 precision=fp32 run.name=readers
""".split()


# By name: the ranks, and what is below `parallelism`.
LAYOUTS = {
    "pp2_zero2_zbv": (4, "pipeline=2 schedule=zbv zero=2"),
    "tp2_zero3": (4, "tensor=2 zero=3"),
    "hsdp": (4, "zero=2 dp_replicate=2"),
    "tp2": (2, "tensor=2 sequence=true"),
    "pp2": (2, "pipeline=2 schedule=1f1b"),
    "zero1": (2, "zero=1"),
    "zero3": (2, "zero=3"),
    "tp2_pp2": (4, "tensor=2 pipeline=2 schedule=interleaved_1f1b"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", marked(list(LAYOUTS), slow=3))
def test_others_read_what_a_layout_saved(two, four, tmp_path, name):
    world, words = LAYOUTS[name]
    overrides = [*RUN, *(f"parallelism.{key}" for key in words.split()), f"run.dir={tmp_path / 'run'}"]
    assert {2: two, 4: four}[world].run("distributed.cells.steps:train", overrides, timeout=120) == [0] * world
    step = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    assert len(list((step / "data").glob("*.distcp"))) > 1

    ours, theirs = empty(step), empty(step)
    load_tensors(step, ours)
    load_with_torch(theirs, checkpoint_id=step / "data", no_dist=True)
    assert len(ours) == 4 * 52  # parameters: four blocks of 12 and 4 more; weight, two moments and step of each
    assert [key for key in ours if bits(ours[key]) != bits(theirs[key])] == []

    config = from_yaml(read_config(step))
    model = GPT(config.model).eval()
    load_tensors(step, model_tensors(Model.of(model.config), [model]), strict=False)
    export(step, tmp_path / "out")
    from transformers import GPT2LMHeadModel  # takes two seconds

    transformer = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    tokens, targets = held_out(config)
    with torch.no_grad():
        logits = transformer(tokens).logits
        expected = F.linear(model.hidden(tokens, None), model.head.weight[:VOCABULARY])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    # And the ranks' own loss, computed in their layout before anything was saved.
    live = next(row["val_loss"] for row in read_metrics(tmp_path / "run") if "val_loss" in row and row["step"] == STEPS)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).item()
    assert loss == pytest.approx(live, abs=1e-5)


def empty(step: Path) -> dict[str, Tensor]:
    """Tensors to read into, of the shapes the manifest has."""
    entries = read_manifest(step).tensors.items()
    return {key: torch.full(entry["shape"], 3, dtype=getattr(torch, entry["dtype"])) for key, entry in entries}


def held_out(config: Config) -> tuple[Tensor, Tensor]:
    """The tokens and targets of the run's evaluation."""
    loader = build_loader(config.data, prepare(config.data, config.seed), ALONE, config.seed)
    loader.close()
    batches = list(loader.validation_batches(config.trainer.eval_samples))
    return torch.cat([batch.tokens for batch in batches]), torch.cat([batch.targets for batch in batches])
