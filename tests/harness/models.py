"""Tiny trained models with a tokenizer, and the requests that their adapters answer."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoint.huggingface_models import committed
from checkpoint.test_llama import TINY as LLAMA
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from gptlite.tokenizers.huggingface import HuggingFaceTokenizer

VOCABULARY = 276
LENGTH = 32  # of the context
END, BEGIN = "<|endoftext|>", "<s>"
TEXT = "The cat sat on the mat, and a dog ran after the cat. No cat minds a mat; the mat lay under the dog.\n"
SIZES = [f"data.vocab_size={VOCABULARY}", f"model.vocab_size={VOCABULARY}", f"model.sequence_length={LENGTH}"]
MODELS = {"gpt2": ["model.num_heads=4", *SIZES], "llama": [*LLAMA, *SIZES], "spaced": [*LLAMA, *SIZES]}
MIXED = {"mixed": [*MODELS["llama"], "model.value_residual=true"]}  # no class of transformers
PAIRS = [
    *[
        ("The cat sat on", " the mat"),
        ("The cat sat on", " the dog ran after the cat"),
        ("", "No cat minds"),
        ("a", "b"),
    ],
    *[("No cat minds a mat; ", "the mat"), (TEXT * 3, "The cat"), ("dog", " " + TEXT[:60]), (TEXT, TEXT[:55])],
]
SPACES = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
TEXTS = [TEXT, "a", TEXT * 4, "The cat sat é"]
GREEDY = {"until": ["cat", "\n\n"], "max_gen_toks": 12}
PROMPTS = [
    ("The cat sat on", GREEDY),
    (TEXT * 3, GREEDY),
    ("No", {"until": [], "max_gen_toks": 20, "do_sample": False}),
]


def tokenizer(kind: str = "gpt2") -> Tokenizer:
    """A byte-level BPE of VOCABULARY ids; for `spaced` one as of Llama 2, which adds a space before a text."""
    if kind == "spaced":
        return spaced()
    rust = Tokenizer(BPE())
    rust.pre_tokenizer, rust.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    rust.train_from_iterator([TEXT] * 9, trainer)
    assert rust.get_vocab_size() == VOCABULARY
    return rust


def spaced() -> Tokenizer:
    """BPE with U+2581 for a space, and a space before a text. Words that no text has fill the vocabulary."""
    learned = Tokenizer(BPE())
    learned.normalizer = SPACES
    trainer = BpeTrainer(vocab_size=90, special_tokens=[END, BEGIN, "<unk>"], show_progress=False)
    learned.train_from_iterator(re.findall(r"\w+", TEXT) * 9, trainer)
    model = json.loads(learned.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    names += [f"\u2581word{number}" for number in range(VOCABULARY - len(names))]
    merges = [tuple(pair) for pair in model["merges"]]
    rust = Tokenizer(BPE({name: number for number, name in enumerate(names)}, merges, unk_token="<unk>"))
    rust.normalizer = SPACES
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(back)
    rust.add_special_tokens([END, BEGIN])
    assert rust.get_vocab_size() == VOCABULARY
    return rust


def saved(root: Path, kind: str) -> Path:
    """The step folder of a model of MODELS or MIXED."""
    root.mkdir(parents=True, exist_ok=True)
    rust = tokenizer(kind)
    ours = HuggingFaceTokenizer(rust.to_str().encode(), eod=rust.token_to_id(END))
    step, _ = committed(root)(*(MODELS | MIXED)[kind], "data.sequence_length=32", tokenizer=ours)
    return step


def requests(arguments: list[Any]) -> list[Any]:
    """What an adapter reads of lm-eval's Instance."""
    return [SimpleNamespace(args=each if isinstance(each, tuple) else (each,)) for each in arguments]
