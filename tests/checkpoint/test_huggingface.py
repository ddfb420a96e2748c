"""What transformers reads of an export computes our logits, and what it writes trains on here."""

import errno
import json
import shlex
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from run_files import read_metrics, snapshot
from safetensors import safe_open
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from gptlite import huggingface
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import from_yaml, load, to_yaml
from gptlite.data.build import build_loader, prepare
from gptlite.data.tokenizer import NumberTokenizer
from gptlite.errors import ConfigError
from gptlite.huggingface import export, import_
from gptlite.model.gpt import GPT
from gptlite.parallelism.main_rank import ALONE
from gptlite.pretrain import pretrain
from gptlite.restore import restore
from gptlite.trainer.state import model_tensors

AUTO = ("checkpoint.resume=auto", "checkpoint.load=all")
VOCABULARY = 53  # in 128 rows
SIZES = {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 16, "vocab_size": VOCABULARY}
MODEL = [
    *("model.num_layers=2", "model.num_heads=3", "model.d_model=24", "model.sequence_length=16", "model.name=tiny"),
    *("data=synthetic", f"data.vocab_size={VOCABULARY}", f"model.vocab_size={VOCABULARY}", "data.sequence_length=16"),
]
Save = Callable[..., tuple[Path, GPT]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Commits a checkpoint of a model whose every parameter, padding too, is far from its initial value."""

    def commit(*overrides: str, scale: float = 0.3) -> tuple[Path, GPT]:
        config = load([*MODEL, "run.dir=unused", "run.name=a", *overrides])
        model = GPT(config.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
        meta = {"step": 7, "data_identity": {}}
        tokenizer = NumberTokenizer(VOCABULARY)
        run = Checkpointer(CheckpointConfig(), tmp_path / "ours")
        return run.save(model_tensors([model]), meta, to_yaml(config), tokenizer, print), model

    return commit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-2 that transformers has saved."""
    torch.manual_seed(0)
    return saved(GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3)), tmp_path / "theirs")


def saved(model: Any, folder: Path, **options: Any) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)  # they begin as zeros
    model.save_pretrained(folder, **options)
    return folder


def restored(step: Path) -> GPT:
    model = GPT(from_yaml(read_config(step)).model)
    load_tensors(step, model_tensors([model]), strict=False)
    return model.eval()


@torch.no_grad()
def our_logits(model: GPT, tokens: Tensor) -> Tensor:
    return F.linear(model.eval().hidden(tokens, None), model.head.weight[: model.config.vocab_size])


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert {name: list(left) for name, left in report.items() if left} == {}
    return model.eval()(tokens).logits


def some_tokens(vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (3, 16), generator=torch.Generator().manual_seed(1))


def same_logits(model: GPT, folder: Path) -> None:
    ours, theirs = our_logits(model, some_tokens()), their_logits(folder, some_tokens())
    assert ours.shape == theirs.shape
    assert ours.std() > 0.5  # or all would agree
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def weights_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


# Export.


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "model.tied_embeddings=false",
        "model.activation=gelu_erf",
        "model.activation=relu model.tied_embeddings=false model.vocab_multiple=1",
        "model.bias=false model.d_ff=40",
        "model.layer_norm_eps=0.3 model.num_heads=1 model.num_layers=1",
    ],
)
def test_transformers_gives_our_logits(save, tmp_path, overrides):
    step, model = save(*overrides.split())
    export(step, tmp_path / "out")
    same_logits(model, tmp_path / "out")


def test_it_is_a_file_that_the_safetensors_package_would_have_written(save, tmp_path):
    step, model = save()
    export(step, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
        assert torch.equal(file.get_tensor("transformer.wte.weight"), model.token_embedding.weight[:VOCABULARY])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    theirs.save_pretrained(tmp_path / "again")
    again = weights_in(tmp_path / "again")
    assert names == again.keys()
    assert [name for name, tensor in weights_in(tmp_path / "out").items() if not torch.equal(tensor, again[name])] == []


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtypes(save, tmp_path, word, dtype):
    step, _ = save()
    export(step, tmp_path / "fp32")
    export(step, tmp_path / "half", dtype=word)
    whole, half = weights_in(tmp_path / "fp32"), weights_in(tmp_path / "half")
    assert whole.keys() == half.keys()
    assert all(torch.equal(tensor.to(dtype), half[name]) for name, tensor in whole.items())
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "half", dtype="auto").dtype == dtype


def test_shards(save, tmp_path):
    step, model = save("model.tied_embeddings=false")
    limit = 7000
    export(step, tmp_path / "out", max_shard_bytes=limit)
    same_logits(model, tmp_path / "out")
    where = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 4
    for file in files:
        tensors = safetensors.torch.load_file(tmp_path / "out" / file)
        assert set(tensors) == {name for name, each in where.items() if each == file}
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    export(step, tmp_path / "one", max_shard_bytes=10**6)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]


def test_the_newest_of_a_run_its_tokenizer_and_what_ends_a_document(save, tmp_path):
    step, _ = save()
    export(step.parents[1], tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    assert snapshot(out / "gptlite_tokenizer") == snapshot(step / "tokenizer")
    config = GPT2Config.from_pretrained(out)
    assert (config.bos_token_id, config.eos_token_id) == (VOCABULARY - 1, VOCABULARY - 1)
    model = GPT2LMHeadModel.from_pretrained(out)
    assert model.generation_config.eos_token_id == VOCABULARY - 1
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_one_tensor_is_in_memory_at_a_time(save, tmp_path, monkeypatch):
    step, _ = save()
    alive: list[weakref.ref] = []
    real = huggingface.load_tensors

    def watched(path: Path, into: dict[str, Tensor], **options: Any) -> None:
        assert len(into) == 1
        assert [ref for ref in alive if ref() is not None] == []
        alive.extend(weakref.ref(tensor.untyped_storage()) for tensor in into.values())
        real(path, into, **options)

    monkeypatch.setattr(huggingface, "load_tensors", watched)
    export(step, tmp_path / "out")
    assert len(alive) == len(read_manifest(step).tensors)


def test_a_matrix_is_written_in_pieces(save, tmp_path, monkeypatch):
    step, _ = save()
    export(step, tmp_path / "whole")
    monkeypatch.setattr("gptlite.checkpoint.safetensors.BLOCK_BYTES", 700)
    export(step, tmp_path / "pieces")
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "pieces")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("taken", {}, "taken exists; nothing is overwritten"),
        ("ours/checkpoints/out", {}, "is among checkpoints"),
        ("out", {"dtype": "bf61"}, "dtype=bf61 is not one of fp32, bf16, fp16; did you mean bf16?"),
        ("out", {"max_shard_bytes": 0}, "max_shard_bytes=0 must be at least 1"),
        ("out", {"dtype": "fp16"}, "transformer.wte.weight holds numbers too large for torch.float16"),
        ("taken/file/out", {}, "file exists; give another folder"),
    ],
)
def test_what_is_not_exported_leaves_nothing(save, tmp_path, name, options, words):
    step, _ = save(scale=1e5)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        export(step, tmp_path / name, **options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert snapshot(tmp_path) == before
    assert list(tmp_path.rglob(".tmp-*")) == []


def test_a_full_disk_and_a_damaged_checkpoint_leave_nothing(save, tmp_path, monkeypatch):
    step, _ = save()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gptlite.checkpoint.huggingface.write", full)
        with pytest.raises(ConfigError, match="no space left on device; give another folder"):
            export(step, tmp_path / "out")
    payload = next((step / "data").glob("*.distcp"))
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        export(step, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


# Import.


@pytest.mark.parametrize("overrides", ["", "model.tied_embeddings=false model.activation=gelu_erf model.d_ff=40"])
def test_what_was_exported_comes_back_bit_for_bit(save, tmp_path, overrides):
    step, model = save(*overrides.split())
    export(step, tmp_path / "out")
    again = restored(import_(tmp_path / "out", tmp_path / "run"))
    assert replace(again.config, name="tiny", peak_lr=model.config.peak_lr) == model.config
    for (name, tensor), (_, ours) in zip(again.named_weights(), model.named_weights(), strict=True):
        rows = VOCABULARY if len(tensor) == model.config.padded_vocab_size else len(tensor)
        assert torch.equal(tensor[:rows], ours[:rows]), name
        assert not tensor[rows:].any(), name  # padding
    export(tmp_path / "run", tmp_path / "twice")
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("tied", "activation"), [(True, "gelu_new"), (False, "gelu"), (True, "relu"), (False, "gelu_pytorch_tanh")]
)
def test_a_model_of_transformers_gives_equal_logits(tmp_path, tied, activation):
    torch.manual_seed(0)
    config = GPT2Config(
        **SIZES, tie_word_embeddings=tied, activation_function=activation, n_inner=36, initializer_range=0.3
    )
    folder = saved(GPT2LMHeadModel(config), tmp_path / "theirs")
    before = snapshot(folder)
    step = import_(folder, tmp_path / "run")
    assert step == tmp_path / "run" / "checkpoints" / "step-00000000"
    same_logits(restored(step), folder)
    assert snapshot(folder) == before


def test_ways_that_a_folder_stores_the_same_weights(folder, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10kB")
    model.transformer.save_pretrained(tmp_path / "bare")  # names without the prefix
    half = tmp_path / "half"
    GPT2LMHeadModel.from_pretrained(folder).bfloat16().save_pretrained(half)
    for name in ("pickled", "legacy"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "config.json", tmp_path / name)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16), "transformer.h.1.attn.masked_bias": torch.tensor(0)}
    torch.save(model.state_dict() | masks, tmp_path / "pickled" / "pytorch_model.bin")
    old = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    torch.save(old, tmp_path / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert isinstance(model.transformer, GPT2Model)
    expected = model_tensors([restored(import_(folder, tmp_path / "run"))])
    for name in ("sharded", "bare", "pickled", "legacy"):
        found = model_tensors([restored(import_(tmp_path / name, tmp_path / f"run-{name}"))])
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name
    found = model_tensors([restored(import_(half, tmp_path / "run-half"))])
    assert [key for key in expected if not torch.equal(found[key], expected[key].bfloat16().float())] == []


def test_it_trains_on_from_their_loss(text, tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 257, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    folder = saved(model, tmp_path / "theirs")
    said: list[str] = []
    import_(folder, tmp_path / "imported", log=said.append)
    data = [*("data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}")]
    data += ["data.global_batch_size=4", "data.micro_batch_size=2", "precision=fp32", f"run.dir={tmp_path / 'run'}"]
    steps = ["trainer.max_steps=4", "trainer.log_interval=1", "trainer.eval_interval=0", "trainer.sample_tokens=0"]
    config = load([*command_of(said)[2:], *data, *steps, "optimizer.lr=1e-2", "schedule.warmup_steps=1"])
    assert pretrain(config) == 0
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
    assert pretrain(load([*command_of(said)[2:], *data, *steps, "trainer.max_steps=5", *AUTO])) == 0
    export(tmp_path / "run", tmp_path / "out")
    model = restored(tmp_path / "run" / "checkpoints" / "step-00000005")
    torch.testing.assert_close(our_logits(model, tokens), their_logits(tmp_path / "out", tokens), rtol=0, atol=1e-5)


def test_data_of_more_token_ids_is_refused(folder, text, tmp_path):
    said: list[str] = []
    import_(folder, tmp_path / "imported", log=said.append)
    data = ["data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(ConfigError, match=r"model\.vocab_size=53 is below the tokenizer's 257"):
        pretrain(load([*command_of(said)[2:], *data, f"run.dir={tmp_path / 'run'}"]))


def test_the_command_that_goes_on_composes_to_the_imported_model(tmp_path):
    config = GPT2Config(**SIZES, n_inner=7, activation_function="gelu", layer_norm_epsilon=1e-6, embd_pdrop=0.25)
    folder = saved(GPT2LMHeadModel(config), tmp_path / "it's a (model)")
    said: list[str] = []
    step = import_(folder, tmp_path / "a run", log=said.append)
    composed = load(command_of(said)[2:])
    assert composed.model == from_yaml(read_config(step)).model
    assert composed.checkpoint.resume == str(tmp_path / "a run")
    assert composed.checkpoint.load == "weights"
    model = composed.model
    assert (model.d_ff, model.activation.name, model.layer_norm_eps, model.dropout) == (7, "gelu_erf", 1e-6, 0.25)
    assert (model.num_layers, model.num_heads, model.d_model, model.sequence_length) == (2, 3, 24, 16)
    assert set(read_manifest(step).tensors) == {key for key in read_manifest(step).tensors if key.startswith("model.")}


def command_of(said: list[str]) -> list[str]:
    words = shlex.split(said[-1][said[-1].index("python train.py") :])
    assert words[:2] == ["python", "train.py"]
    return words


def test_a_vocabulary_of_another_size_is_refused_where_the_padded_rows_are_the_same(text, tmp_path):
    torch.manual_seed(0)
    folder = saved(GPT2LMHeadModel(GPT2Config(**SIZES | {"vocab_size": 300})), tmp_path / "theirs")  # 384 rows, as 257
    said: list[str] = []
    import_(folder, tmp_path / "imported", log=said.append)
    words = [word for word in command_of(said)[2:] if not word.startswith("model.vocab_size=")]
    data = ["data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(ConfigError, match=r"model\.vocab_size=257 \(was 300\); give 300"):
        pretrain(load([*words, *data, f"run.dir={tmp_path / 'run'}"]))


def test_imported_weights_are_not_passed_over(text, tmp_path):
    torch.manual_seed(0)
    folder = saved(GPT2LMHeadModel(GPT2Config(**SIZES)), tmp_path / "theirs")
    import_(folder, tmp_path / "run", log=lambda _: None)
    for words in (["checkpoint.load=weights"], ["checkpoint.resume=never"]):
        with pytest.raises(ConfigError, match="already holds step-00000000"):
            pretrain(load([*words, "data=synthetic", f"run.dir={tmp_path / 'run'}"]))
    with pytest.raises(ConfigError, match="holds imported weights without a tokenizer: train on from it"):
        restore(str(tmp_path / "run"))
