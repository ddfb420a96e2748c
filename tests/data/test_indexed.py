"""The files of tokens: their bytes, and what is said when they are damaged."""

import struct

import numpy as np
import pytest
from token_folders import write_numbers as write

from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError
from gptlite.progress import Progress
from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.satellites.data_tool.verify import verify

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


SILENT = Progress("", 0, print)


def kept(folder):
    return IndexedWriter(folder / "kept", "fingerprint", 10, EOD, folder / "kept.lengths")


@pytest.mark.parametrize("number", range(len(DOCUMENTS) + 1))
def test_taken_up_again_the_bytes_are_the_same(tmp_path, prefix, monkeypatch, number):
    """Saved after so many documents; then a document is lost and one is cut off in the middle."""
    monkeypatch.setattr("gptlite.satellites.corpus.indexed._BLOCK", 6)
    monkeypatch.setattr("gptlite.satellites.corpus.indexed._MAX_SEQUENCE", 4)

    def add(writer, documents):
        for document in documents:
            writer.write(document, text_bytes=2 * len(document))
            writer.end_document()

    def interrupted():
        nonlocal saved
        with kept(tmp_path) as writer:
            add(writer, DOCUMENTS[:number])
            saved = writer.save()
            add(writer, [[1, 2]])
            writer.save()  # of which nobody has taken note yet
            writer.write([3], text_bytes=1)
            raise KeyboardInterrupt

    saved = None
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with open(tmp_path / "kept.lengths", "ab") as file:
        file.write(b"cut")
    for _ in range(2):  # the second time after its end
        with kept(tmp_path) as writer:
            writer.go_on(saved, SILENT)
            add(writer, DOCUMENTS[number:])
            saved, number = writer.save(), len(DOCUMENTS)
        assert same_files(tmp_path / "kept", prefix)


@pytest.mark.parametrize(("name", "content"), [("kept.bin", b"x"), ("kept.bin", b""), ("kept.lengths", b"")])
def test_what_was_damaged_meanwhile_is_not_gone_on_with(tmp_path, name, content):
    with kept(tmp_path) as writer:
        writer.end_document()
        saved = writer.save()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"kept.bin has changed since it was written;"), kept(tmp_path) as writer:
        writer.go_on(saved, SILENT)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1, EOD, 2], [2, 1], "lacks its eod"),
        ([1, EOD], [1], "the lengths of 1 documents do not sum to 2"),
        ([1, EOD], [2, 0], "documents have 0 to 2"),
        ([1, EOD], [3, -1], "documents have -1 to 3"),
        ([65_536 + 1, EOD], [2], "outside the vocabulary"),
        ([-1, EOD], [2], "outside the vocabulary"),
        ([1.0, EOD], [2], "integers, not float64"),
    ],
)
def test_documents_that_are_none_are_refused(tmp_path, tokens, lengths, message):
    with pytest.raises(ValueError, match=message), IndexedWriter(tmp_path / "train", "", 10, EOD) as writer:
        writer.write_documents(np.array(tokens), np.array(lengths), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_long_document_is_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("gptlite.satellites.corpus.indexed._MAX_SEQUENCE", 4)
    with IndexedWriter(tmp_path / "train", "", 10, EOD) as writer:
        for part in ([1, 2, 3], [4, 5, 6]):
            writer.write(part, 3)
        writer.end_document()
    dataset = IndexedDataset(tmp_path / "train")
    assert dataset.lengths.tolist() == [3, 4]
    assert documents(dataset)[0] == [1, 2, 3, 4, 5, 6, EOD]
