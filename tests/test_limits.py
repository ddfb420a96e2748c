"""Sizes beyond gptlite.limits are refused within a second and 200 MB, before any work that grows with them."""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gptlite.checkpoint.huggingface import read_object
from gptlite.config import load
from gptlite.config.saved import read_saved, to_yaml
from gptlite.data.order_log import FILE_NAME, read_order
from gptlite.errors import ConfigError
from gptlite.launch.hostfile import read_hosts
from gptlite.satellites.huggingface.adapters import all_adapters
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.huggingface import byte_alphabet
from gptlite.tokenizers.sentence_piece_words import _fields

SECONDS, BYTES = 1.0, 200_000_000
ADAPTERS = {each.model_type: each for each in all_adapters()}


def adapted(path: Path, kind: str, **changes: int) -> None:
    gpt2 = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
    llama = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    llama["num_key_value_heads"] = 2
    sizes = gpt2 if kind == "gpt2" else llama | {"max_position_embeddings": 16}
    path.write_text(json.dumps({"vocab_size": 50} | sizes | changes))
    ADAPTERS[kind].from_json(read_object(path), "name")


def saved(path: Path, key: str, value: int) -> None:
    content = yaml.safe_load(to_yaml(load([])))
    content["model"][key] = value
    path.write_text(yaml.safe_dump(content))
    read_saved(path)


def tokenizer(path: Path, number: int) -> None:
    vocabulary = {**byte_alphabet(), "<|endoftext|>": number}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    path = path.with_suffix(".json")
    path.write_text(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    find_tokenizer(str(path), None)


def definition(path: Path, text: str) -> None:
    (path.parent / "definition.json").write_text(text)
    load_tokenizer(path.parent)


def ranks(path: Path, number: int) -> None:
    import base64

    path = path.with_suffix(".tiktoken")
    path.write_text("".join(f"{base64.b64encode(bytes([n])).decode()} {n or number}\n" for n in range(256)))
    find_tokenizer(str(path), None)


def tekken(path: Path, **changes: int) -> None:
    config = {"pattern": ".", "default_vocab_size": 300, "default_num_special_tokens": 9} | changes
    (path.parent / "tekken.json").write_text(json.dumps({"config": config, "vocab": []}))
    find_tokenizer(str(path.parent / "tekken.json"), None)


def hosts(path: Path) -> None:
    path.write_text("node1 slots=100000000000\n")
    read_hosts(path)


def meta(path: Path, **changes: int) -> None:
    path.write_text(json.dumps({"dim": 8, "n_layers": 1, "n_heads": 2, "multiple_of": 8, "vocab_size": 50} | changes))
    ADAPTERS["llama"].from_meta(read_object(path), [{}])


def order(path: Path, **changes: object) -> None:
    sets = {"a": {"data": "h", "tokens": 99, "weight": 1.0}}
    row = {
        "step": 0,
        "samples": 0,
        "global_batch_size": 10**6,
        "eras": [{"start": 0, "sequence_length": 8, "sets": sets}],
    }
    (path.parent / FILE_NAME).write_text(json.dumps(row | changes) + "\n")
    read_order(path.parent)[0].schedule()


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "layers": (lambda _: load(["model.num_layers=1000000000"]), "model.num_layers=1000000000 must be at most 100,000"),
    "vocabulary": (lambda _: load(["model.vocab_size=10000000000"]), "model.vocab_size=10000000000 must be at most"),
    "ramp": (
        lambda _: load(["data.batch_ramp=[1,1,9]", "data.global_batch_size=1000000", "data.sequence_length=8"]),
        "has 1,000,000 sizes, more than 10,000",
    ),
    "logged ramp": (lambda path: order(path, batch_ramp=[1, 1, 9]), "has 1,000,000 sizes, more than 10,000"),
    "saved layers": (lambda path: saved(path, "num_layers", 10**9), "model.num_layers=1000000000 must be at most"),
    "saved vocabulary": (lambda path: saved(path, "vocab_size", 10**10), "model.vocab_size=10000000000 must be at"),
    "GPT-2's layers": (lambda path: adapted(path, "gpt2", n_layer=10**9), "n_layer=1000000000 must be a whole number"),
    "Llama's layers": (
        lambda path: adapted(path, "llama", num_hidden_layers=10**9),
        "num_hidden_layers=1000000000 must be a whole number from 1 to 100,000",
    ),
    "Llama's vocabulary": (lambda path: adapted(path, "llama", vocab_size=10**10), "vocab_size=10000000000 must be"),
    "Mixtral's experts": (
        lambda path: adapted(path, "mixtral", num_local_experts=10**9, num_experts_per_tok=2),
        "1000000000 experts in 2 layers are more than 262,144 experts",
    ),
    "experts": (lambda _: load(["model=gpt-lite", "model.moe.experts=1000000"]), "are more than 262,144 experts"),
    "Meta's layers": (lambda path: meta(path, n_layers=10**9), "n_layers=1000000000 must be a whole number"),
    "id": (lambda path: tokenizer(path, 400_000_000), "has the id 400000000; at most 16,777,216 ids are supported"),
    "rank": (lambda path: ranks(path, 400_000_000), "an id is repeated, negative, or 16,777,216 or more"),
    "definition": (
        lambda path: definition(path, '{"kind": "numbers", "vocab_size": 10000000000}'),
        "definition.json.vocab_size is 10000000000, not 1 to 16,777,216",
    ),
    "special tokens": (
        lambda path: tekken(path, default_num_special_tokens=10**9),
        "default_num_special_tokens is 1000000000, not 0 to 65,536",
    ),
    "tekken's vocabulary": (lambda path: tekken(path, default_vocab_size=10**10), "10000000000, not 1 to 16,777,216"),
    "slots": (hosts, "'node1 slots=100000000000' is not HOST slots=RANKS"),
    "varint": (lambda _: list(_fields(b"\x08" + b"\xff" * 10**6)), "byte 1 does not begin a number"),
    "field": (lambda _: list(_fields(b"\x0a\xff\xff\xff\xff\x0f")), "is longer than the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_size_beyond_its_limit_is_refused_before_work(name: str, tmp_path: Path) -> None:
    run, words = CASES[name]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as refusal:
        run(tmp_path / "file")
    assert words in str(refusal.value)
    assert time.process_time() - started < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES
