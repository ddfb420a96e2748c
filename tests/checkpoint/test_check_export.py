"""An export is loaded with transformers before it appears, and has its tokenizer for AutoTokenizer and an import."""

from pathlib import Path

import pytest
import torch
from checkpoint.huggingface_models import Save, committed
from checkpoint.test_llama import TINY as LLAMA
from harness.models import END, SIZES, TEXT, VOCABULARY, saved
from transformers import AutoTokenizer

from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool import check_export, huggingface
from gptlite.satellites.checkpoint_tool.huggingface import EXPORTED, export, import_
from gptlite.tokenizers.base import ByteTokenizer, Tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.tiktoken import TiktokenTokenizer
from gptlite.trainer.restore import restore

TEXTS = [TEXT, "", "  two\n\nlines \t of a 😀 cat</s><|endoftext|>", "naïve 漢字 12345 don't"]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return committed(tmp_path)


def ranks() -> Tokenizer:
    """A table whose pieces form in steps, or only as whole words; with gaps between ids."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" c", b" cat", b"\n\n", "漢".encode(), b"12"]
    named = {"<|begin|>": len(pieces), END: VOCABULARY - 1}
    return TiktokenTokenizer(
        {each: n for n, each in enumerate(pieces)}, r" ?\p{L}+|\p{N}{1,2}|\s+|[^\s\p{L}\p{N}]+", named
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "spaced"])
def test_the_comparison_is_logged(tmp_path: Path, kind: str, dtype: str) -> None:
    said: list[str] = []
    export(saved(tmp_path, kind), tmp_path / "hf", dtype=dtype, log=said.append)
    assert any("loaded with transformers" in line and "nats apart" in line for line in said)


def test_an_export_that_transformers_refuses_is_not_announced(save: Save, tmp_path: Path) -> None:
    step, _ = save(*LLAMA, "model.d_model=48", "model.num_heads=5", "model.kv_heads=5", "model.head_dim=16")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"does not load the export .*48.* is not a multiple .*; nothing is written"):
        export(step, tmp_path / "hf", log=said.append)
    assert not (tmp_path / "hf").exists()
    assert not any("exported" in line for line in said)
    export(step, tmp_path / "hf", check=False, log=said.append)
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_other_numbers_are_refused(save: Save, tmp_path: Path, monkeypatch) -> None:
    step, _ = save()
    real = huggingface._weight
    monkeypatch.setattr(huggingface, "_weight", lambda *given: torch.roll(real(*given), 1, 0))
    with pytest.raises(ConfigError, match=r"the export has other log probabilities in transformers .* nats apart"):
        export(step, tmp_path / "hf", log=lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


def test_without_transformers_nothing_is_compared(save: Save, tmp_path: Path, monkeypatch) -> None:
    step, _ = save()
    for module in (huggingface, check_export):
        monkeypatch.setattr(module, "transformers_version", lambda: "")
    said: list[str] = []
    with pytest.raises(ConfigError, match="check=true needs transformers; install it"):
        export(step, tmp_path / "hf", check=True, log=said.append)
    export(step, tmp_path / "hf", log=said.append)
    assert not any("nats apart" in line for line in said)


def test_a_large_export_is_compared_on_request(save: Save, tmp_path: Path, monkeypatch) -> None:
    step, _ = save()
    monkeypatch.setattr(huggingface, "MOST_BYTES", 1000)
    for check, compared in ((None, False), (True, True)):
        said: list[str] = []
        export(step, tmp_path / f"hf-{check}", check=check, log=said.append)
        assert any("nats apart" in line for line in said) == compared


@pytest.mark.parametrize("kind", ["tokenizer.json", "spaced", "ranks"])
def test_autotokenizer_has_the_ids_of_the_run(save: Save, tmp_path: Path, kind: str) -> None:
    if kind == "ranks":
        step, _ = save("model.num_heads=4", *SIZES, tokenizer=ranks())
    else:
        step = saved(tmp_path, "spaced" if kind == "spaced" else "gpt2")
    export(step, tmp_path / "hf", log=lambda _: None)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), restore(str(step)).tokenizer
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        if kind != "spaced":  # which does not know all characters
            assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eod
    assert len(theirs) <= VOCABULARY


def test_autotokenizer_makes_no_empty_tokenizer(save: Save, tmp_path: Path) -> None:
    """As transformers 5.24 does of a folder with a model of GPT-2's type alone."""
    step, _ = save("model.num_heads=4", *SIZES, tokenizer=ByteTokenizer())
    said: list[str] = []
    export(step, tmp_path / "hf", log=said.append)
    assert any("no tokenizer for AutoTokenizer: export needs a tokenizer.json" in line for line in said)
    with pytest.raises(ValueError, match="tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("make", [ByteTokenizer, ranks])
def test_an_import_of_an_export_has_its_tokenizer(save: Save, tmp_path: Path, make) -> None:
    step, _ = save("model.num_heads=4", *SIZES, tokenizer=make())
    export(step, tmp_path / "hf", log=lambda _: None)
    said: list[str] = []
    imported = import_(tmp_path / "hf", tmp_path / "imported", log=said.append)
    assert any(f"its {make().kind} tokenizer of {make().vocab_size:,} ids is imported" in line for line in said)
    assert not any("is not imported" in line for line in said)
    found = restore(str(tmp_path / "imported"))
    assert found.tokenizer.fingerprint == make().fingerprint
    assert find_tokenizer(str(tmp_path / "hf")).fingerprint == make().fingerprint
    export(imported, tmp_path / "again", log=lambda _: None)
    assert find_tokenizer(str(tmp_path / "again" / EXPORTED)).fingerprint == make().fingerprint
