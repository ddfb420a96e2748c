"""Llama weights in Meta's files: logits of transformers, in one shard and two; and what is refused."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.huggingface_models import redraw, restored
from checkpoint.test_llama import logits, tokens_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool.huggingface import export, import_
from gptlite.tokenizers.find import find_tokenizer

SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
SIZES = {
    **{"vocab_size": 54, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5},
    **{"num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64, "intermediate_size": 112},
}
PARAMS = {
    **{"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 16},
    **{"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "max_seq_len": 64},
}
# Name in transformers, name of Meta, and the dim that Llama 2's ranks cut.
NAMES = {
    **{"self_attn.q_proj": ("attention.wq", 0), "self_attn.k_proj": ("attention.wk", 0)},
    **{"self_attn.v_proj": ("attention.wv", 0), "self_attn.o_proj": ("attention.wo", 1)},
    **{"mlp.gate_proj": ("feed_forward.w1", 0), "mlp.up_proj": ("feed_forward.w3", 0)},
    **{"mlp.down_proj": ("feed_forward.w2", 1), "input_layernorm": ("attention_norm", None)},
    **{"post_attention_layernorm": ("ffn_norm", None), "model.embed_tokens": ("tok_embeddings", 1)},
    **{"model.norm": ("norm", None), "lm_head": ("output", 0)},
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llama_2": ({}, {}, 1),
    "llama_2_shards": ({}, {}, 2),
    "llama_3_shards": ({"rope_theta": 5e5}, {"rope_theta": 500000.0, "vocab_size": 54}, 2),
    "llama_3_scaled": ({"rope_parameters": SCALED}, {"rope_theta": 500000.0, "use_scaled_rope": True}, 2),
    "llama_3_tied": ({"tie_word_embeddings": True}, {}, 1),
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of halves, as transformers has them, in Meta's order: 0, D/2, 1, D/2 + 1, ... of each head."""
    width = len(weight) // heads
    order = [head * width + i // 2 + (width // 2) * (i % 2) for head in range(heads) for i in range(width)]
    return weight[order]


def write(folder: Path, model: LlamaForCausalLM, params: dict[str, Any], shards: int, rows: bool = False) -> Path:
    """Meta's files of a model of transformers; with `rows` the embedding is cut by rows, as Llama 3's is."""
    folder.mkdir()
    found: list[dict[str, torch.Tensor]] = [{"rope.freqs": torch.ones(4)} for _ in range(shards)]
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        layer = f"layers.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        meta, dim = NAMES[stem.partition(layer)[2] if layer else stem]
        for short, heads in (("wq", 4), ("wk", 2)):
            tensor = interleaved(tensor, heads) if meta.endswith(short) else tensor
        dim = 0 if rows and meta == "tok_embeddings" else dim
        parts = [tensor] * shards if dim is None else tensor.chunk(shards, dim)
        for shard, part in zip(found, parts, strict=True):
            shard[f"{layer}{meta}.weight"] = part.detach().clone()
    for number, shard in enumerate(found):
        torch.save(shard, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Path, LlamaForCausalLM]]:
    def make(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Path, LlamaForCausalLM]:
        changes, params, shards = KINDS[kind]
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES | changes)).to(dtype)
        redraw(model, "norm.weight", 1.0)
        rows = kind.startswith("llama_3")
        return write(tmp_path / "theirs", model, PARAMS | params | more, shards, rows), model.eval()

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(made, tmp_path, kind):
    folder, theirs = made(kind)
    ours, tokens = restored(import_(folder, tmp_path / "run")), tokens_of(40)
    assert ours.config.tied_embeddings == (kind == "llama_3_tied")
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_bf16_goes_to_transformers_bit_for_bit(made, tmp_path):
    folder, theirs = made("llama_2_shards", torch.bfloat16)
    (folder / "tokenizer.model").write_bytes(b"kept")
    export(import_(folder, tmp_path / "run"), tmp_path / "hf", dtype="bf16")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    expected = theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"kept"


def change(name: str) -> Callable[[Path], None]:
    def drop_shard(folder: Path) -> None:
        (folder / "consolidated.00.pth").unlink()

    def drop_tensor(folder: Path) -> None:
        shard = torch.load(folder / "consolidated.01.pth")
        del shard["layers.1.attention.wk.weight"]
        torch.save(shard, folder / "consolidated.01.pth")

    def add_tensor(folder: Path) -> None:
        shard = torch.load(folder / "consolidated.00.pth")
        torch.save(shard | {"layers.0.experts.weight": torch.ones(2)}, folder / "consolidated.00.pth")

    def damage(folder: Path) -> None:
        (folder / "consolidated.01.pth").write_bytes(b"PK" + bytes(50))

    return locals()[name]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("drop_shard", "give all shards, numbered from 00"),
        ("drop_tensor", r"layers.1.attention.wk.weight is missing from 1 of 2 files"),
        ("add_tensor", "layers.0.experts.weight is not a tensor of a Llama with 2 layers"),
        ("damage", r"consolidated.01.pth cannot be read as a state dict"),
        ({"moe_args": {}}, "moe_args is not a key of Llama 2 or 3"),
        ({"n_heads": "4"}, 'params.json: n_heads="4" must be a whole number'),
        ({"multiple_of": 256}, r"gate_proj.weight has shape \[112, 32\], but config.json requires \[256, 32\]"),
        ({"vocab_size": 60}, r"embed_tokens.weight has shape \[54, 32\], but config.json requires \[60, 32\]"),
    ],
    ids=str,
)
def test_other_files_are_refused_in_one_line(made, tmp_path, what, words):
    folder, _ = made("llama_2_shards", **(what if isinstance(what, dict) else {}))
    if isinstance(what, str):
        change(what)(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        import_(folder, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "size", "cut"),
    [(128_000, 128_256, [257, 258, 260, ord("4")]), (200_000, 202_048, [257, 258, 260, ord("4")])],
)
def test_the_tokenizers_of_llama_3_and_4_are_read(tmp_path, ranks, size, cut):
    """Bytes, a few merges and words of no text as ranks, with special tokens after them; numbers are split after three
    digits. Only Llama 4's pattern cuts before a capital letter."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"12", b"123", b"1234", b"eT"]
    pieces += [b"\xff\xfe%d" % number for number in range(ranks - len(pieces))]
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate(pieces)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    found = find_tokenizer(str(tmp_path))
    assert (found.vocab_size, found.eod, found.bos) == (size, ranks + 1, ranks)
    assert found.encode("the the1234") == cut
    assert (262 in found.encode("seTs")) == (ranks == 128_000)
    assert found.decode(found.encode("the the<|eot_id|>")) == "the the<|eot_id|>"
