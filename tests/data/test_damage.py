"""Damaged input, a case a kind: a clear error of one line that names the file, or a counted skip; no wrong token."""

import json
import os
import struct

import numpy as np
import pytest
from token_folders import write_megatron
from token_folders import write_numbers as write

from gptlite.data.folder import open_split
from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.satellites.data_tool.verify import verify
from gptlite.tokenizers.base import ByteTokenizer, load_tokenizer

HEADER = 34


def poke(offset, form, *values):
    def damage(path):
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, offset, *values)
        path.write_bytes(content)

    return damage


def instead(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


def edit(**values):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# Three documents of 4, 1 and 2 tokens, uint16: .bin 14 bytes; .idx lengths at 34, pointers at 46, documents at 70.
AT_OPENING = {
    "bin missing": (".bin", lambda p: p.unlink(), "cannot be opened (No such file"),
    "bin truncated": (".bin", lambda p: p.write_bytes(p.read_bytes()[:-1]), "has 13 bytes, but its .idx requires 14"),
    "bin empty": (".bin", lambda p: p.write_bytes(b""), "has 0 bytes, but its .idx requires 14"),
    "bin longer": (".bin", lambda p: p.write_bytes(p.read_bytes() + b"xx"), "has 16 bytes, but its .idx requires 14"),
    "bin a folder": (".bin", instead(lambda p: p.mkdir()), "is not a regular file"),
    "idx missing": (".idx", lambda p: p.unlink(), "cannot be opened (No such file"),
    "idx empty": (".idx", lambda p: p.write_bytes(b""), "does not begin with b'MMIDIDX"),
    "idx cut in its header": (".idx", lambda p: p.write_bytes(p.read_bytes()[:20]), "does not begin with"),
    "idx truncated": (".idx", lambda p: p.write_bytes(p.read_bytes()[:-8]), "has 94 bytes, but 3 sequences"),
    "idx longer": (".idx", lambda p: p.write_bytes(p.read_bytes() + b"xx"), "has 104 bytes, but 3 sequences"),
    "idx a pipe": (".idx", instead(os.mkfifo), "is not a regular file"),
    "idx a device": (".idx", instead(lambda p: p.symlink_to("/dev/zero")), "is not a regular file"),
    "wrong magic": (".idx", poke(0, "<c", b"X"), "does not begin with"),
    "another framework's magic": (".idx", poke(0, "<8s", b"TNTIDX\0\0"), "does not begin with"),
    "future version": (".idx", poke(9, "<Q", 2), "its version is 2, not 1"),
    "dtype of floats": (".idx", poke(17, "<B", 7), "dtype code is 7, a floating"),
    "dtype unknown": (".idx", poke(17, "<B", 9), "dtype code is 9, which is unknown"),
    "dtype of another size": (".idx", poke(17, "<B", 4), "starts at byte 8, but the previous one ends at 16"),
    "more sequences than there are": (".idx", poke(18, "<Q", 2**62), "bytes, but 4611686018427387904 sequences"),
    "no document indices at all": (".idx", poke(26, "<Q", 0), "and 0 document indices"),
    "length negative": (".idx", poke(HEADER + 4, "<i", -1), "the length of sequence 1 is -1"),
    "length of the last too long": (".idx", poke(HEADER + 8, "<i", 3), "has 14 bytes, but its .idx requires 16"),
    "lengths overflow": (".idx", poke(HEADER, "<i", 2**31 - 1), "but the previous one ends at 4294967294"),
    "pointers out of order": (".idx", poke(46, "<3q", 0, 10, 8), "sequence 1 starts at byte 10, but the previous"),
    "pointers start late": (".idx", poke(46, "<3q", 2, 10, 12), "starts at byte 2, not 0"),
    "pointer negative": (".idx", poke(62, "<q", -8), "sequence 2 starts at byte -8"),
    "documents start late": (".idx", poke(70, "<q", 1), "run from sequence 1 to 3"),
    "documents end early": (".idx", poke(94, "<q", 2), "run from sequence 0 to 2"),
    "documents out of order": (".idx", poke(78, "<2q", 2, 1), "document 1 starts at sequence 2, but ends before"),
    "document index beyond the sequences": (".idx", poke(86, "<q", 99), "document 2 starts at sequence 99, but ends"),
    "meta garbage": (".meta.json", lambda p: p.write_text("{"), "cannot be read"),
    "meta not UTF-8": (".meta.json", lambda p: p.write_bytes(b"\xff\xfe"), "cannot be read"),
    "meta a list": (".meta.json", lambda p: p.write_text("[1]"), "cannot be read"),
    "meta lacks a field": (".meta.json", lambda p: p.write_text('{"eod": 9}'), "cannot be read"),
    "meta of strings": (".meta.json", edit(eod="9"), 'eod is "9", not an integer'),
    "meta of another dataset": (".meta.json", edit(tokens=8), "gives 8 tokens in 3 documents"),
}


@pytest.mark.parametrize("case", AT_OPENING)
def test_opening_names_the_damage(tmp_path, case):
    suffix, damage, message = AT_OPENING[case]
    path = write(tmp_path / "train").with_name("train" + suffix)
    damage(path)
    with pytest.raises(ConfigError) as error:
        IndexedDataset(tmp_path / "train")
    named = f"{tmp_path / 'train'}.idx" if case == "dtype of another size" else str(path)
    if case != "length of the last too long":  # .bin and .idx disagree, and either may be wrong
        assert str(error.value).startswith(named)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


VERIFIED = {
    "a byte of the tokens": (".bin", poke(0, "<H", 4), "its sha256 is"),
    "id beyond the vocabulary": (".bin", poke(4, "<H", 10), "token 2 is 10, outside the vocabulary of 10"),
    "end of document lost": (".bin", poke(8, "<H", 3), "document 1 does not end with the end-of-document token, 9"),
    "another end of document": (".meta.json", edit(eod=8), "document 0 does not end with the end-of-document token, 8"),
    "vocabulary of another tokenizer": (".meta.json", edit(vocab_size=9), "token 3 is 9, outside the vocabulary of 9"),
    "hash of another file": (".meta.json", edit(sha256="0" * 64), "not the 000"),
    "a document without tokens": (".idx", poke(78, "<2q", 1, 1), "document 1 does not end with"),
}


@pytest.mark.parametrize("case", VERIFIED)
def test_verify_names_the_damage(tmp_path, case):
    suffix, damage, message = VERIFIED[case]
    prefix = write(tmp_path / "train")
    verify(IndexedDataset(prefix))
    damage(prefix.with_name("train" + suffix))
    dataset = IndexedDataset(prefix)
    with pytest.raises(ConfigError) as error:
        verify(dataset)
    assert str(error.value).startswith(f"{prefix}.bin is damaged: ")
    assert message in str(error.value)


def test_negative_ids_are_found(tmp_path):
    write_megatron(tmp_path / "m", [[[1, -1]]], np.int32)
    with pytest.raises(ConfigError, match="token 1 is -1, outside the vocabulary of 10"):
        verify(IndexedDataset(tmp_path / "m"), vocab_size=10)


FOLDER = {
    "tokenizer missing": ("tokenizer/definition.json", lambda p: p.unlink(), "has no readable tokenizer"),
    "tokenizer garbage": ("tokenizer/definition.json", lambda p: p.write_bytes(b"\xff{"), "has no readable tokenizer"),
    "tokenizer cut off": ("tokenizer/definition.json", lambda p: p.write_text("{"), "has no readable tokenizer"),
    "tokenizer a list": ("tokenizer/definition.json", lambda p: p.write_text("[]"), "has no readable tokenizer"),
    "tokenizer unknown": ("tokenizer/definition.json", edit(kind="wordpiece"), 'kind is "wordpiece", not byte or char'),
    "tokenizer without its model": ("tokenizer/definition.json", edit(kind="sentencepiece"), "no readable tokenizer"),
    "tokenizer without its definition": ("tokenizer/definition.json", edit(kind="char"), "has no readable tokenizer"),
    "another tokenizer": ("tokenizer/definition.json", edit(kind="numbers", vocab_size=300), "bin was not written"),
    "meta missing": ("train.meta.json", lambda p: p.unlink(), "does not exist"),
    "meta of another tokenizer": ("train.meta.json", edit(tokenizer="0" * 64), "bin was not written with"),
}


@pytest.mark.parametrize("case", FOLDER)
def test_a_prepared_folder_whose_parts_do_not_fit_is_refused(tmp_path, case):
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    with IndexedWriter(tmp_path / "train", tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod) as writer:
        writer.write(tokenizer.encode("a cat"), 5)
        writer.end_document()

    def opened():
        return open_split(tmp_path, "train", load_tokenizer(tmp_path / "tokenizer"))

    assert opened().tokens.tolist() == [*b"a cat", 256]
    name, damage, message = FOLDER[case]
    damage(tmp_path / name)
    with pytest.raises(ConfigError) as error:
        opened()
    assert str(tmp_path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [0, 1, 39, 40, 77, 78, 79])
def test_a_large_index_is_looked_at_in_parts_and_verified_whole(tmp_path, monkeypatch, place):
    """80 documents, of which opening sees the first 4 and the last: what it misses, verify finds."""
    monkeypatch.setattr("gptlite.data.indexed._LOOKED_AT", 64)
    prefix = write(tmp_path / "train", [[1]] * 80)
    poke(HEADER + 4 * 80 + 8 * place, "<q", 7)(prefix.with_suffix(".idx"))
    with pytest.raises(ConfigError, match=f"sequence {place}|sequence {place + 1}|starts at byte 7, not 0|has 320"):
        verify(IndexedDataset(prefix))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 80, 1000])
def test_the_parts_looked_at_reach_both_ends(monkeypatch, count):
    from gptlite.data.indexed import _spaced

    monkeypatch.setattr("gptlite.data.indexed._LOOKED_AT", 64)
    seen = np.zeros(count)
    for start, stop in _spaced(count):
        assert 0 <= start <= stop <= count
        seen[start:stop] += 1
    assert not count or (seen[0] and seen[-1])
    assert seen.all() or seen.sum() == 64
