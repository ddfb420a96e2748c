"""Megatron-core reads what we write, and we read what it writes, token for token."""

import warnings

import numpy as np
import pytest

from gptlite.data.indexed import DTYPES, IndexedDataset
from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.satellites.data_tool.verify import verify

VOCABULARIES = [65_499, 65_500, 65_535, 65_536, 65_537, 200_000]
SHAPES = {
    "one": [3],
    "empty documents": [0, 2, 0, 0, 5, 0],
    "only empty documents": [0, 0],
    "no documents": [],
    "many": [*range(40)] * 3,
}


@pytest.fixture(scope="module")
def megatron():
    """The module itself: 5 s to import, with all of megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Transformer Engine and Apex
        from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def bodies(shape, vocab_size):
    """Ids from the whole vocabulary, its last ones among them; `eod` is the last."""
    random = np.random.default_rng(len(shape))
    return [random.integers(max(0, vocab_size - 40), vocab_size - 1, length) for length in SHAPES[shape]]


def megatron_write(megatron, prefix, documents, dtype, multimodal=False):
    """As tools/preprocess_data.py does: a document is a list of sequences; an empty one has none."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for sequences in documents:
        tokens = np.concatenate([*sequences, np.zeros(0, dtype=np.int64)])
        lengths = [len(each) for each in sequences]
        builder.add_document(tokens, lengths, modes=[n % 2 for n in range(len(lengths))])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_write_the_same_bytes_and_read_the_others(megatron, tmp_path, shape, vocab_size):
    eod = vocab_size - 1
    documents = [np.append(body, eod) for body in bodies(shape, vocab_size)]
    dtype = megatron.DType.optimal_dtype(vocab_size)
    megatron_write(megatron, tmp_path / "theirs", [[each] for each in documents], dtype)
    with IndexedWriter(tmp_path / "ours", "", vocab_size, eod) as writer:
        for document in documents:
            writer.write(document[:-1], 0)
            writer.end_document()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()

    ours = IndexedDataset(tmp_path / "theirs")
    assert ours.dtype == dtype
    assert [ours.document(n).tolist() for n in range(ours.num_documents)] == [each.tolist() for each in documents]
    verify(ours, vocab_size)
    if documents:  # Megatron cannot map an empty .bin, its own neither
        theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
        assert [each.tolist() for each in theirs[:]] == [each.tolist() for each in documents]
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("code", sorted(DTYPES))
def test_we_read_every_dtype_several_sequences_a_document_and_empty_ones(megatron, tmp_path, code, multimodal):
    dtype = megatron.DType.dtype_from_code(code)
    top = min(np.iinfo(dtype).max, 2**40)
    random = np.random.default_rng(code)
    shapes = [[], [3], [2, 4], [], [1, 1, 5], [0], []]
    documents = [[random.integers(0, top, size, endpoint=True) for size in shape] for shape in shapes]
    documents[1][0][0] = top
    megatron_write(megatron, tmp_path / "train", documents, dtype, multimodal)
    dataset = IndexedDataset(tmp_path / "train")
    assert dataset.dtype == dtype
    assert (dataset.modes is not None) == multimodal
    if dataset.modes is not None:
        assert dataset.modes.tolist() == [n % 2 for shape in shapes for n in range(len(shape))]
    wanted = [np.concatenate([*each, np.zeros(0, dtype=np.int64)]).tolist() for each in documents]
    assert [dataset.document(n).tolist() for n in range(dataset.num_documents)] == wanted
    verify(dataset, top + 1)


# What megatron-core 0.16.1 wrote for the documents [[0, 1], [2]], [], [[65535]] with dtype uint16, multimodal.
GOLDEN_BIN = "000001000200ffff"
GOLDEN_IDX = (
    "4d4d494449445800000100000000000000080300000000000000040000000000000002000000010000000100000000000000000000000400"
    "00000000000006000000000000000000000000000000020000000000000002000000000000000300000000000000000100"
)


def test_bytes_that_megatron_wrote_once(tmp_path):
    (tmp_path / "m.bin").write_bytes(bytes.fromhex(GOLDEN_BIN))
    (tmp_path / "m.idx").write_bytes(bytes.fromhex(GOLDEN_IDX))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.meta is None
    assert dataset.modes is not None
    assert dataset.modes.tolist() == [0, 1, 0]
    assert [dataset.document(n).tolist() for n in range(dataset.num_documents)] == [[0, 1, 2], [], [65535]]


@pytest.mark.slow
def test_the_golden_bytes_are_megatrons(megatron, tmp_path):
    documents = [[np.array([0, 1]), np.array([2])], [], [np.array([65535])]]
    megatron_write(megatron, tmp_path / "m", documents, np.uint16, multimodal=True)
    assert (tmp_path / "m.bin").read_bytes().hex() == GOLDEN_BIN
    assert (tmp_path / "m.idx").read_bytes().hex() == GOLDEN_IDX
