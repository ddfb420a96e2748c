"""Export of a tokenizer to a folder that transformers.AutoTokenizer loads, with identical token ids.

A tokenizer.json goes out as it came in. The merges of a table of ranks are those that tiktoken makes, and the merges of
a SentencePiece BPE follow from the scores of its pieces.
"""

import json
import random
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from gptlite.errors import ConfigError, needed_package
from gptlite.files import new_folder
from gptlite.invocation import command
from gptlite.tokenizers.base import Tokenizer
from gptlite.tokenizers.huggingface import HuggingFaceTokenizer, byte_alphabet
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer
from gptlite.tokenizers.sentence_piece_words import SPACE
from gptlite.tokenizers.tiktoken import TiktokenTokenizer

_PROBES = 300  # random texts encoded for comparison before the folder is written


def export_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the new `folder`. Raises the errors of `tokenizer_files`."""
    texts = tokenizer_files(tokenizer)
    with new_folder(folder) as temporary:
        for name, content in texts.items():
            (temporary / name).write_text(content, encoding="utf-8")


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return {file name: content} of tokenizer.json (for the `tokenizers` library) and tokenizer_config.json.

    As a check, the original and the exported tokenizer encode random texts drawn from the whole vocabulary. Raises
    ConfigError if their ids differ, or for a tokenizer that cannot be written so: of bytes or characters, or a
    SentencePiece model unlike those trained by gptlite.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content, more = tokenizer.used.decode(), {}
    elif isinstance(tokenizer, TiktokenTokenizer):
        content, more = _json_of_ranks(tokenizer), {}
    elif isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.encodes_by_words:
        content = _json_of_pieces(tokenizer)
        more = {"unk_token": tokenizer.processor.id_to_piece(0), "add_prefix_space": False}
    else:
        raise ConfigError(
            "export needs a tokenizer.json, a table of ranks, or a SentencePiece BPE as trained by "
            f"{command('train-tokenizer')}; this {tokenizer.kind} tokenizer is not one"
        )
    end = _compare(tokenizer, content)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": end,  # GPT-2 has one token for both
        **more,
        "split_special_tokens": True,  # text that spells out a special token is plain text
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}


def _json_of_ranks(tokenizer: TiktokenTokenizer) -> str:
    """Return the tokenizer.json of a table of ranks. Its merges are in the order of the ranks that they form."""
    with needed_package("tokenizers", "a tokenizer.json"):
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Rust
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    ranks = tokenizer.ranks
    vocabulary = {spelled(piece): token for piece, token in ranks.items()} | tokenizer.special
    merges = [tuple(map(spelled, _halves(piece, ranks))) for piece in ranks if len(piece) > 1]
    made = Rust(models.BPE(vocabulary, [pair for pair in merges if len(pair) == 2]))
    cuts = pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in tokenizer.special])
    content = json.loads(made.to_str())
    content["model"]["ignore_merges"] = True  # a word that is a token is one, as in tiktoken
    return json.dumps(content, ensure_ascii=False)


def _halves(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two pieces of which a BPE forms `piece`: what it makes of these bytes with lower ranks alone."""
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, ranks[piece]), n) for n, (a, b) in enumerate(pairwise(parts))]
        rank, n = min(pairs)
        if rank >= ranks[piece]:  # no merge leads to it: it only ever is a whole word
            break
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return parts


def _json_of_pieces(tokenizer: SentencePieceTokenizer) -> str:
    with needed_package("tokenizers", "a tokenizer.json"):
        from tokenizers import AddedToken, decoders, models, normalizers
        from tokenizers import Tokenizer as Rust
    processor, ids = tokenizer.processor, range(tokenizer.vocab_size)
    names = [processor.id_to_piece(token) for token in ids]
    special = [names[token] for token in ids if processor.is_control(token) or processor.is_unknown(token)]
    merges = _merges(processor, [name for name in names if name not in special])
    vocabulary = {name: token for token, name in enumerate(names)}
    # fuse_unk=False and byte fallback: an unknown character becomes its bytes, as in SentencePiece.
    made = Rust(models.BPE(vocabulary, merges, unk_token=names[0], fuse_unk=False, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False)


def _merges(processor: Any, texts: list[str]) -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a piece, in SentencePiece's merge order: descending score.

    SentencePiece models store only pieces; Hugging Face's BPE needs pairs. Pairs that form the same piece are adjacent.
    """
    ids = {name: token for name in texts if not processor.is_byte(token := processor.piece_to_id(name))}
    order = sorted((name for name in ids if len(name) > 1), key=lambda name: -processor.get_score(ids[name]))
    pairs = ((name[:cut], name[cut:]) for name in order for cut in range(1, len(name)))
    return [pair for pair in pairs if pair[0] in ids and pair[1] in ids]


def _compare(tokenizer: Tokenizer, content: str) -> str:
    """Return the name of the token that ends documents. Raises ConfigError if the exported tokenizer differs."""
    other, rng = HuggingFaceTokenizer(content.encode(), tokenizer.eod), random.Random(0)
    words = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    words += [" ", "  ", "\n", "\n\n", "\t", "0", "</s>", "<0x0A>", "\U0001f600", "é", "漢", "\0", "aaaa"]
    for text in islice(("".join(rng.choices(words, k=rng.randrange(80))) for _ in iter(int, 1)), _PROBES):
        if other.encode(text) != tokenizer.encode(text):
            raise ConfigError(f"export: the exported tokenizer has different ids for {text[:60]!r}; nothing is written")
    return other.name_of(tokenizer.eod)
