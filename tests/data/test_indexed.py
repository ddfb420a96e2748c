"""The files of tokens: their bytes, and what is said when they are damaged."""

import struct

import numpy as np
import pytest
from token_folders import write_numbers as write

from gptlite.data.indexed import IndexedDataset, IndexedWriter
from gptlite.data.verify import verify

DOCUMENTS = [[5, 6, 7], [], [8]]
EOD = 9


def documents(dataset):
    return [dataset.document(n).tolist() for n in range(dataset.num_documents)]


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "train")


def test_layout_is_megatrons_byte_for_byte(prefix):
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<7H", 5, 6, 7, EOD, EOD, 8, EOD)
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    assert struct.unpack_from("<QBQQ", index, 9) == (1, 8, 3, 4)  # version, uint16, sequences, documents + 1
    assert struct.unpack_from("<3i", index, 34) == (4, 1, 2)
    assert struct.unpack_from("<3q", index, 46) == (0, 8, 10)
    assert struct.unpack_from("<4q", index, 70) == (0, 1, 2, 3)
    assert len(index) == 102


def test_reads_back_documents_and_counts(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.tokens.tolist() == [5, 6, 7, EOD, EOD, 8, EOD]
    assert documents(dataset) == [[5, 6, 7, EOD], [EOD], [8, EOD]]
    assert dataset.meta is not None
    assert (dataset.meta.documents, dataset.meta.tokens, dataset.meta.text_bytes) == (3, 7, 8)
    verify(dataset)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "<u2"), (65500, "<i4"), (200_000, "<i4")])
def test_takes_four_bytes_where_two_do_not_do(tmp_path, vocab_size, dtype):
    dataset = IndexedDataset(write(tmp_path / "train", [[vocab_size - 1]], vocab_size))
    assert dataset.tokens.dtype == np.dtype(dtype)
    assert dataset.tokens[0] == vocab_size - 1


@pytest.mark.parametrize("token", [-1, 10, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_not_wrapped_and_leaves_no_file(tmp_path, token):
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        write(tmp_path / "train", [[1], [token]])
    assert list(tmp_path.iterdir()) == []


def same_files(one, other):
    suffixes = (".bin", ".idx", ".meta.json")
    pairs = [[prefix.with_name(prefix.name + suffix) for prefix in (one, other)] for suffix in suffixes]
    return all(a.read_bytes() == b.read_bytes() for a, b in pairs)


def flat(documents):
    ended = [[*document, EOD] for document in documents]
    return np.concatenate(ended), np.array([len(document) for document in ended])


@pytest.mark.parametrize("dtype", ["u2", "i4", "i8", "u8"])
def test_many_documents_at_once_are_the_same_bytes(tmp_path, prefix, dtype):
    tokens, lengths = flat(DOCUMENTS)
    with IndexedWriter(tmp_path / "bulk", "fingerprint", 10, EOD) as writer:
        writer.write_documents(tokens.astype(dtype), lengths, text_bytes=8)
        writer.write_documents(tokens[:0], lengths[:0], text_bytes=0)
    assert same_files(tmp_path / "bulk", prefix)


def test_joined_shards_are_the_same_bytes(tmp_path, prefix, monkeypatch):
    monkeypatch.setattr("gptlite.data.indexed._BLOCK", 6)
    shards = [write(tmp_path / f"shard{n}", part) for n, part in enumerate([DOCUMENTS[:2], [], DOCUMENTS[2:]])]
    with IndexedWriter(tmp_path / "joined", "fingerprint", 10, EOD) as writer:
        for shard in shards:
            writer.append(IndexedDataset(shard))
    assert same_files(tmp_path / "joined", prefix)
    verify(IndexedDataset(tmp_path / "joined"))


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1, EOD, 2], [2, 1], "each ended by eod"),
        ([1, EOD], [1], "not 1 documents"),
        ([1, EOD], [2, 0], "documents of 0 to 2"),
        ([1, EOD], [3, -1], "documents of -1 to 3"),
        ([65_536 + 1, EOD], [2], "outside the vocabulary"),
        ([-1, EOD], [2], "outside the vocabulary"),
        ([1.0, EOD], [2], "integers, not float64"),
    ],
)
def test_documents_that_are_none_are_refused(tmp_path, tokens, lengths, message):
    with pytest.raises(ValueError, match=message), IndexedWriter(tmp_path / "train", "", 10, EOD) as writer:
        writer.write_documents(np.array(tokens), np.array(lengths), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_of_another_tokenizer_is_not_joined(tmp_path, prefix):
    with pytest.raises(ValueError, match="not of the tokenizer"), IndexedWriter(tmp_path / "x", "", 10, EOD) as writer:
        writer.append(IndexedDataset(prefix))


def test_a_long_document_is_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("gptlite.data.indexed._MAX_SEQUENCE", 4)
    with IndexedWriter(tmp_path / "train", "", 10, EOD) as writer:
        for part in ([1, 2, 3], [4, 5, 6]):
            writer.write(part, 3)
        writer.end_document()
    dataset = IndexedDataset(tmp_path / "train")
    assert dataset.lengths.tolist() == [3, 4]
    assert documents(dataset)[0] == [1, 2, 3, 4, 5, 6, EOD]


def test_no_documents_at_all(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "train", []))
    assert len(dataset.tokens) == dataset.num_documents == 0


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def documents():
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "train", documents())
    assert list(tmp_path.iterdir()) == []
