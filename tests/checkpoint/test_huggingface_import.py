"""What transformers writes trains on here, and what was exported comes back."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoint.huggingface_models import (
    AUTO,
    VOCABULARY,
    Save,
    committed,
    our_logits,
    parameters_of,
    restored,
    same_logits,
    their_logits,
    theirs,
)
from run_files import read_metrics, snapshot
from transformers import GPT2LMHeadModel, GPT2Model

from gptlite.checkpoint.load import read_config
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import load
from gptlite.config.saved import from_yaml
from gptlite.data.build import build_loader, prepare
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.parallelism.rank_sync import ALONE
from gptlite.satellites.checkpoint_tool.huggingface import export, import_
from gptlite.start.pretrain import pretrain
from gptlite.trainer.restore import restore


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return committed(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return theirs(tmp_path / "theirs")


@pytest.mark.parametrize("overrides", ["", "model.tied_embeddings=false model.mlp=gelu_erf model.d_ff=40"])
def test_what_was_exported_comes_back_bit_for_bit(save, tmp_path, overrides):
    step, model = save(*overrides.split())
    export(step, tmp_path / "données")
    again = restored(import_(tmp_path / "données", tmp_path / "run"))
    assert replace(again.config, name="tiny", peak_lr=model.config.peak_lr) == model.config
    for (name, tensor), (_, ours) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        rows = VOCABULARY if len(tensor) == model.config.padded_vocab_size else len(tensor)
        assert torch.equal(tensor[:rows], ours[:rows]), name
        assert not tensor[rows:].any(), name  # padding
    export(tmp_path / "run", tmp_path / "twice")
    once, twice = (tmp_path / name / "model.safetensors" for name in ("données", "twice"))
    assert once.read_bytes() == twice.read_bytes()


def test_what_an_import_does_not_need_comes_back(folder, tmp_path):
    """The ids that end a text, generation_config.json, a tokenizer's files: without them generate() does not stop."""
    model, prompt = GPT2LMHeadModel.from_pretrained(folder), torch.tensor([[1, 2, 3]])
    first = int(model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1])
    model.config.bos_token_id = model.config.eos_token_id = model.generation_config.eos_token_id = first
    model.config.task_specific_params = {"mine": {"length": 3}}
    model.generation_config.max_new_tokens = 9
    model.save_pretrained(folder)
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    export(import_(folder, tmp_path / "run"), tmp_path / "out", dtype="bf16")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert [len(each.generate(prompt, do_sample=False, pad_token_id=0)[0]) for each in (model, again)] == [4, 4]
    for name in ("generation_config.json", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out"))
    differing = {key: after[key] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert list(differing.values()) == ["bfloat16"]


@pytest.mark.parametrize(
    ("tied", "activation"), [(True, "gelu_new"), (False, "gelu"), (True, "relu"), (False, "gelu_pytorch_tanh")]
)
def test_a_model_of_transformers_gives_equal_logits(tmp_path, tied, activation):
    folder = theirs(tmp_path / "theirs", tie_word_embeddings=tied, activation_function=activation, n_inner=36)
    before = snapshot(folder)
    step = import_(folder, tmp_path / "run")
    assert step == tmp_path / "run" / "checkpoints" / "step-00000000"
    same_logits(restored(step), folder)
    assert snapshot(folder) == before


def test_ways_that_a_folder_stores_the_same_weights(folder, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10kB")
    model.transformer.save_pretrained(tmp_path / "bare")  # names without the prefix
    GPT2LMHeadModel.from_pretrained(folder).bfloat16().save_pretrained(tmp_path / "half")
    for name in ("pickled", "legacy"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "config.json", tmp_path / name)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16), "transformer.h.1.attn.masked_bias": torch.tensor(0)}
    torch.save(model.state_dict() | masks, tmp_path / "pickled" / "pytorch_model.bin")
    old = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    torch.save(old, tmp_path / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert isinstance(model.transformer, GPT2Model)
    expected = parameters_of(restored(import_(folder, tmp_path / "run")))
    for name in ("sharded", "bare", "pickled", "legacy", "half"):
        found = parameters_of(restored(import_(tmp_path / name, tmp_path / f"run-{name}")))
        if name == "half":
            expected = {key: tensor.bfloat16().float() for key, tensor in expected.items()}
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name


@pytest.mark.slow
def test_it_trains_on_from_their_loss(text, tmp_path):
    sizes = {"vocab_size": 257, "n_positions": 32, "initializer_range": 0.1}
    folder = theirs(tmp_path / "theirs", **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    said: list[str] = []
    import_(folder, tmp_path / "imported", log=said.append)
    data = [*("data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}")]
    data += ["data.global_batch_size=4", "data.micro_batch_size=2", "precision=fp32", f"run.dir={tmp_path / 'run'}"]
    steps = ["trainer.max_steps=4", "trainer.log_interval=1", "trainer.eval_interval=0", "trainer.sample_tokens=0"]
    config = load([*command_of(said), *data, *steps, "optimizer.lr=1e-2", "schedule.warmup_steps=1"])
    assert pretrain(config).exit_code == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]

    loader = build_loader(config.data, prepare(config.data, config.seed), ALONE, config.seed)
    batches = [loader.batch(0, index) for index in range(2)]
    loader.close()
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
    their_loss = F.cross_entropy(their_logits(folder, tokens).flatten(0, 1), targets.flatten()).item()
    assert losses[0] == pytest.approx(their_loss, abs=1e-5)
    assert losses[-1] < losses[0] - 0.3
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"weights from {tmp_path / 'imported' / 'checkpoints' / 'step-00000000'}" in log
    assert "data.tokenizer=byte (was none)" in log

    # The run that went on is one like any other: it resumes, and it exports.
    assert pretrain(load([*command_of(said), *data, *steps, "trainer.max_steps=5", *AUTO])).exit_code == 0
    export(tmp_path / "run", tmp_path / "out")
    model = restored(tmp_path / "run" / "checkpoints" / "step-00000005")
    torch.testing.assert_close(our_logits(model, tokens), their_logits(tmp_path / "out", tokens), rtol=0, atol=1e-5)


def test_the_command_that_goes_on_composes_to_the_imported_model(tmp_path):
    changes = {"n_inner": 7, "activation_function": "gelu", "layer_norm_epsilon": 1e-6, "embd_pdrop": 0.25}
    folder = theirs(tmp_path / "it's a (model)", **changes)
    said: list[str] = []
    step = import_(folder, tmp_path / "a run", log=said.append)
    composed = load(command_of(said))
    assert composed.model == from_yaml(read_config(step)).model
    assert composed.checkpoint.resume == str(tmp_path / "a run")
    assert composed.checkpoint.load == "weights"
    model = composed.model
    assert (model.d_ff, model.mlp.name, model.norm_eps, model.dropout) == (7, "gelu_erf", 1e-6, 0.25)
    assert (model.num_layers, model.num_heads, model.d_model, model.sequence_length) == (2, 3, 24, 16)
    assert set(read_manifest(step).tensors) == {key for key in read_manifest(step).tensors if key.startswith("model.")}


def command_of(said: list[str]) -> list[str]:
    start = command("train")
    return shlex.split(said[-1][said[-1].index(start) + len(start) :])


def test_a_vocabulary_of_another_size_is_refused_where_the_padded_rows_are_the_same(text, tmp_path):
    folder = theirs(tmp_path / "theirs", vocab_size=300)  # 384 rows, as 257
    said: list[str] = []
    import_(folder, tmp_path / "imported", log=said.append)
    words = [word for word in command_of(said) if not word.startswith("model.vocab_size=")] + ["model.vocab_size=null"]
    data = ["data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(ConfigError, match=r"model\.vocab_size=257 \(was 300\); give 300"):
        pretrain(load([*words, *data, f"run.dir={tmp_path / 'run'}"]))


def test_imported_weights_are_not_passed_over(folder, tmp_path):
    import_(folder, tmp_path / "run", log=lambda _: None)
    for words in (["checkpoint.load=weights"], ["checkpoint.resume=never"]):
        with pytest.raises(ConfigError, match="already holds step-00000000"):
            pretrain(load([*words, "data=synthetic", f"run.dir={tmp_path / 'run'}"]))
    with pytest.raises(
        ConfigError, match="holds imported weights without a tokenizer; give their tokenizer=PATH, or train"
    ):
        restore(str(tmp_path / "run"))
