"""What transformers reads of an export computes our logits."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint.conftest import disk_full
from checkpoint.destruction.wounds import flip
from checkpoint.huggingface_models import VOCABULARY, Save, committed, same_logits, weights_in
from run_files import snapshot
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptlite.checkpoint.manifest import read_manifest
from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool import huggingface
from gptlite.satellites.checkpoint_tool.huggingface import export
from gptlite.tokenizers import export as tokenizer_export
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return committed(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "model.tied_embeddings=false",
        "model.mlp=gelu_erf",
        "model.mlp=relu model.tied_embeddings=false model.vocab_multiple=1",
        "model.bias=false model.d_ff=40",
        "model.norm_eps=0.3 model.num_heads=1 model.num_layers=1",
        "model.kv_heads=3 model.head_dim=8",  # what they are by default
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
def test_an_export_has_the_dtype_asked_for(save, tmp_path, word, dtype):
    step, _ = save()
    export(step, tmp_path / "fp32")
    export(step, tmp_path / "half", dtype=word)
    whole, half = weights_in(tmp_path / "fp32"), weights_in(tmp_path / "half")
    assert whole.keys() == half.keys()
    assert all(torch.equal(tensor.to(dtype), half[name]) for name, tensor in whole.items())
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "half", dtype="auto").dtype == dtype


def test_a_large_export_is_split_into_files_below_the_limit(save, tmp_path):
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
    monkeypatch.setattr("gptlite.checkpoint.huggingface.BLOCK_BYTES", 700)
    export(step, tmp_path / "pieces")
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "pieces")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("taken", {}, "taken exists; nothing is overwritten"),
        ("ours/checkpoints/out", {}, "is in a checkpoints folder"),
        ("out", {"dtype": "bf61"}, "dtype=bf61 is not one of fp32, bf16, fp16; did you mean bf16?"),
        ("out", {"max_shard_bytes": 0}, "max_shard_bytes=0 must be at least 1"),
        ("out", {"dtype": "fp16"}, "transformer.wte.weight has values that overflow torch.float16"),
        ("taken/file/out", {}, "file: File exists; remove it, or give another folder"),
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

    with monkeypatch.context() as patch:
        patch.setattr("gptlite.checkpoint.huggingface._write", disk_full)
        with pytest.raises(ConfigError, match="No space left on device; free some space, or give another folder"):
            export(step, tmp_path / "out")
    flip(step / "data" / "__0_0.distcp")
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        export(step, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


def test_an_export_has_its_sentencepiece_for_autotokenizer(save: Save, tmp_path: Path, monkeypatch) -> None:
    lines = ["the quick brown fox jumps over the lazy dog", "naïve 漢字 in 12345 lines"] * 9
    tokenizer = train_sentencepiece(lines, 330, lambda _: None)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    sizes = (f"data.vocab_size={tokenizer.vocab_size}", f"model.vocab_size={tokenizer.vocab_size}")
    step, _ = save(*sizes, tokenizer=tokenizer)
    export(step, tmp_path / "hf")
    other = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (*lines[:2], "  two\n\nlines \t of a 😀 fox</s>", ""):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == text
    assert other.eos_token_id == tokenizer.eod == GPT2Config.from_pretrained(tmp_path / "hf").eos_token_id
    merges = tokenizer_export._merges
    monkeypatch.setattr(tokenizer_export, "_merges", lambda *given: merges(*given)[::-1])  # in the wrong order
    said: list[str] = []
    export(step, tmp_path / "without", log=said.append)
    assert any("no tokenizer for AutoTokenizer: " in line for line in said)
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    assert (tmp_path / "without" / "model.safetensors").exists()
