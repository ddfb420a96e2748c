"""Tokenizers, prepared folders and corpora."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.mutations import json_files, octets
from fuzz.reader import TEXT, Reader, quiet, reader
from hypothesis import strategies as st
from token_folders import documents, write_folder

from gptlite.data.indexed import IndexedDataset
from gptlite.data.vocabulary import vocabulary_of_folder
from gptlite.progress import Progress
from gptlite.satellites.data_tool.foreign import Corrections, datatrove_documents, open_datatrove
from gptlite.satellites.data_tool.verify import verify
from gptlite.satellites.preprocess.blocks import Cutting
from gptlite.satellites.preprocess.encode import _document
from gptlite.satellites.preprocess.settings import difference, read_settings
from gptlite.satellites.preprocess.streams import DamagedInput, Stream
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.sentence_piece import train_sentencepiece


@reader
def definition(folder: Path) -> Reader:
    """definition.json of a tokenizer of any kind."""
    from gptlite.tokenizers.base import CharTokenizer, NumberTokenizer
    from gptlite.tokenizers.tiktoken import TiktokenTokenizer

    ranks = {bytes([n]): n for n in range(256)}
    CharTokenizer("abc é").save(folder)
    TiktokenTokenizer(ranks, r"\w+|\s+", {"<|endoftext|>": 256}).save(folder)
    valid = [
        {"kind": "char", "alphabet": "abc é"},
        {"kind": "numbers", "vocab_size": NumberTokenizer(9).vocab_size},
        {"kind": "byte"},
        {"kind": "tiktoken", "pattern": r"\w+|\s+", "special": {"<|endoftext|>": 256}, "eod": "<|endoftext|>"},
    ]

    def read(content: bytes) -> None:
        (folder / "definition.json").write_bytes(content)
        used(load_tokenizer(folder))

    return Reader(st.one_of(*map(json_files, valid)), read)


def used(tokenizer: Any) -> None:
    """Encode and decode a text, and describe the tokenizer."""
    tokenizer.decode(tokenizer.encode(TEXT))
    assert len(tokenizer.fingerprint) == 64
    assert tokenizer.token_bytes().size == tokenizer.vocab_size


def _found(path: Path) -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        path.write_bytes(content)
        used(find_tokenizer(str(path), None))

    return read


def _huggingface(folder: Path) -> tuple[Path, dict[str, Any]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from gptlite.tokenizers.huggingface import byte_alphabet

    made = Tokenizer(models.BPE({**byte_alphabet(), "th": 256, "the": 257}, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json", json.loads((folder / "tokenizer.json").read_bytes())


@reader
def tokenizer_json(folder: Path) -> Reader:
    """A tokenizer.json of byte-level BPE."""
    path, valid = _huggingface(folder)
    return Reader(json_files(valid), _found(path))


@reader
def tokenizer_config(folder: Path) -> Reader:
    """tokenizer_config.json beside a tokenizer.json."""
    path, _ = _huggingface(folder)

    def read(content: bytes) -> None:
        path.with_name("tokenizer_config.json").write_bytes(content)
        find_tokenizer(str(path), None)

    return Reader(
        json_files({"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "model_max_length": 10**30}), read
    )


@reader
def sentencepiece_model(folder: Path) -> Reader:
    """A SentencePiece model."""
    trained = train_sentencepiece([TEXT, "a dog ran after the cat\n"] * 20, 300, quiet)
    return Reader(octets(trained.definition()), _found(folder / "tokenizer.model"))


@reader
def tiktoken_ranks(folder: Path) -> Reader:
    """A table of ranks, of tiktoken or Llama 3."""
    lines = [base64.b64encode(bytes([n])) + b" %d" % n for n in range(256)] + [base64.b64encode(b"th") + b" 256", b""]
    files = [_found(folder / name) for name in ("a.tiktoken", "tokenizer.model")]
    return Reader(octets(b"\n".join(lines)), lambda content: [read(content) for read in files])


@reader
def tekken(folder: Path) -> Reader:
    """Mistral's tekken.json."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the"]
    valid = {
        "config": {"pattern": r"\w+|\s+", "default_vocab_size": 261, "default_num_special_tokens": 3, "version": "v3"},
        "vocab": [{"rank": n, "token_bytes": base64.b64encode(each).decode()} for n, each in enumerate(pieces)],
        "special_tokens": [{"rank": n, "token_str": name} for n, name in enumerate(("<unk>", "<s>", "</s>"))],
    }
    return Reader(json_files(valid), _found(folder / "tekken.json"))


@reader
def datatrove(folder: Path) -> Reader:
    """The index of a .ds file of datatrove."""
    path = folder / "a.ds"
    path.write_bytes(np.arange(20, dtype="<u2").tobytes())

    def read(content: bytes) -> None:
        path.with_name("a.ds.index").write_bytes(content)
        tokens, ends = open_datatrove(path)
        progress = Progress("importing", tokens.nbytes, quiet)
        for batch in datatrove_documents(path, tokens, ends, 19, 20, Corrections(), progress):
            assert batch.lengths.sum() == len(batch.tokens)

    return Reader(octets(np.array([3, 3, 11, 20], dtype="<u8").tobytes()), read)


@reader
def token_meta(folder: Path) -> Reader:
    """train.meta.json of a prepared folder."""
    return _prepared(folder, ".meta.json", lambda path: json_files(json.loads(path.read_bytes())))


@reader
def token_index(folder: Path) -> Reader:
    """train.idx of a prepared folder."""
    return _prepared(folder, ".idx", lambda path: octets(path.read_bytes()))


@reader
def token_file(folder: Path) -> Reader:
    """train.bin of a prepared folder."""
    return _prepared(folder, ".bin", lambda path: octets(path.read_bytes()))


def _prepared(folder: Path, suffix: str, files: Callable[[Path], st.SearchStrategy[bytes]]) -> Reader:
    write_folder(folder, train=documents(1, 12), val=documents(2, 3))
    path = folder / f"train{suffix}"

    def read(content: bytes) -> None:
        replaced = path.with_name("next")
        replaced.write_bytes(content)
        replaced.replace(path)  # an earlier one may still be mapped
        vocabulary_of_folder(folder)
        verify(IndexedDataset(folder / "train"), None, quiet)

    return Reader(files(path), read)


@reader
def preprocess_settings(folder: Path) -> Reader:
    """preprocess.json beside unfinished output."""
    path = folder / "preprocess.json"
    valid = {
        **{"version": 1, "tokenizer": "0" * 64, "field": "text", "separator": "", "max_record_bytes": 100},
        **{"validation_fraction": 0.01, "input": [{"path": "a", "format": "text", "size": 3, "modified": 1}]},
    }

    def read(content: bytes) -> None:
        path.write_bytes(content)
        if found := read_settings(path):
            difference(found, valid)

    return Reader(json_files(valid), read)


@reader
def corpus(folder: Path) -> Reader:
    """Records of a corpus, compressed or not."""
    import gzip

    lines = [json.dumps({"text": TEXT, "id": 1, "meta": {"a": [1]}}) + "\n"] * 3
    plain = octets("".join(lines).encode())
    cutting = Cutting("text", "", 1 << 20)

    def read(content: bytes) -> None:
        (folder / "x").write_bytes(content)
        stream = Stream(str(folder / "x"))
        data = stream.read(1 << 20)
        stream.close()
        for line in data.split(b"\n"):
            try:
                _document(line, "jsonl", cutting)
            except (ValueError, RecursionError):  # a bad record is skipped, and noted
                continue

    packed = octets(gzip.compress("".join(lines).encode()))
    return Reader(st.one_of(plain, packed, plain.map(gzip.compress)), read, (DamagedInput,))
