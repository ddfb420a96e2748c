"""Data of other tools: imported, or refused by name with the way to convert it, never read as something else."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest

from gptlite.data.folder import open_split
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.text import find_files
from gptlite.satellites.data_tool.import_ import Options, run
from gptlite.satellites.preprocess.inputs import find_sources
from gptlite.tokenizers.base import NumberTokenizer, load_tokenizer

EOD = 99
TOKENS = [5, 6, EOD, 7, EOD, 98, 0, EOD]


@pytest.fixture
def imports(tmp_path: Path) -> Callable[..., list[list[int]]]:
    """Import a path as token files, with a vocabulary of `size`; the training documents."""

    def call(path: Path, format: str = "nanogpt", size: int = 100, **options: str) -> list[list[int]]:
        NumberTokenizer(size).save(tmp_path / f"numbers-{size}")
        given = Options(
            format, str(tmp_path / "out"), str(tmp_path / f"numbers-{size}"), validation_fraction=0, **options
        )
        assert run([str(path)], given) == 0
        dataset = open_split(tmp_path / "out", "train", load_tokenizer(tmp_path / "out" / "tokenizer"))
        return [dataset.document(n).tolist() for n in range(dataset.num_documents)]

    return call


def raw(path: Path, dtype: str, tokens: list[int] = TOKENS) -> Path:
    path.parent.mkdir(exist_ok=True)
    np.array(tokens, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("name", ["train.bin", "part-0-00000.npy"])  # OLMo-core's have no header
def test_raw_tokens_of_any_type(imports, tmp_path: Path, dtype: str, name: str) -> None:
    assert imports(raw(tmp_path / name, dtype), dtype=dtype) == [[5, 6, EOD], [7, EOD], [98, 0, EOD]]


def test_four_bytes_are_not_read_as_two(imports, tmp_path: Path) -> None:
    wide = raw(tmp_path / "train.bin", "uint32")
    with pytest.raises(
        ConfigError, match=r"every second number of .*train.bin is 0, as if .* 4 bytes; give dtype=uint32"
    ):
        imports(wide)
    with pytest.raises(ConfigError, match="the vocabulary of 100,352 does not fit in uint16; give dtype=uint32"):
        imports(wide, size=100352)
    assert not (tmp_path / "out").exists()
    assert imports(raw(tmp_path / "zeros.bin", "uint16", [0, 0, 0, 0]), eod=None) == [[0, 0, 0, 0, EOD]]


def test_dtype_is_refused_elsewhere(imports, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype=uint32 is for format=nanogpt only"):
        imports(raw(tmp_path / "x.bin", "uint32"), "llmc", dtype="uint32")
    with pytest.raises(ConfigError, match="dtype=uint24 is not one of uint8, uint16, uint32, int32, int64"):
        imports(raw(tmp_path / "x.bin", "uint32"), dtype="uint24")


def datatrove(path: Path, dtype: str, lengths: list[int]) -> Path:
    """As datatrove 0.10.1 writes it: raw tokens, and the documents' ends in uint64."""
    raw(path, dtype)
    ends = [sum(lengths[: n + 1]) % 2**64 for n in range(len(lengths))]
    np.array(ends, dtype="<u8").tofile(f"{path}.index")
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("at_a_time", [1, 100])
def test_datatroves_documents_end_where_its_index_says(imports, tmp_path, monkeypatch, dtype, at_a_time) -> None:
    monkeypatch.setattr("gptlite.satellites.data_tool.foreign._DOCUMENTS", at_a_time)
    path = datatrove(tmp_path / "in" / "00000_00000_shuffled.ds", dtype, [3, 0, 3, 2])
    assert imports(path, "datatrove") == [[5, 6, EOD], [7, EOD, 98, EOD], [0, EOD]]


def test_a_folder_of_datatrove(imports, tmp_path: Path) -> None:
    for number, lengths in enumerate([[3, 5], [8]]):
        datatrove(tmp_path / "in" / f"0000{number}_shuffled.ds", "uint16", lengths)
    assert imports(tmp_path / "in", "datatrove") == [TOKENS[:3], TOKENS[3:], TOKENS]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, 4], "its documents end at token 7, but a.ds has 16 bytes"),
        ([9, -1], "its documents end at token 8"),
        ([2**62, 2**62, 2**63, 8 - 2**64], "its documents end at token 8"),  # beyond int64
    ],
)
def test_a_wrong_index_is_named(imports, tmp_path: Path, lengths: list[int], said: str) -> None:
    path = datatrove(tmp_path / "in" / "a.ds", "uint16", lengths)
    with pytest.raises(ConfigError, match=f"a.ds.index is damaged: {said}"):
        imports(path, "datatrove")
    (tmp_path / "in" / "a.ds.index").unlink()
    with pytest.raises(ConfigError, match=r"a.ds.index, with the documents' ends, does not exist; copy it too"):
        imports(path, "datatrove")


STARTS = {
    "llm.c's header": (np.array([20240520, 1], "<i4").tobytes(), "begins with llm.c's header; give format=llmc"),
    "a header of NumPy": (b"\x93NUMPY\x01\x00v\x00", "a NumPy array with a header; write the tokens alone: numpy.load"),
    "Megatron's index": (b"MMIDIDX\x00\x00\x01", "the index of a Megatron dataset; import it: .* format=megatron"),
    "Parquet": (b"PAR1\x15\x04\x15\x08", "a Parquet file; tokenize it: .*preprocess.* input="),
    "gzip": (b"\x1f\x8b\x08\x08abcd", "compressed by gzip; decompress it"),
    "zstd": (b"\x28\xb5\x2f\xfdabcd", "compressed by zstd; decompress it"),
    "zip": (b"PK\x03\x04abcd", "a zip archive; unpack it"),
}


@pytest.mark.parametrize("case", STARTS)
def test_another_format_is_not_read_as_tokens(imports, tmp_path: Path, case: str) -> None:
    start, said = STARTS[case]
    path = tmp_path / "train.bin"
    path.write_bytes(start + b"\x01\x00" * 600)
    with pytest.raises(ConfigError, match=f"^format=nanogpt: {path} (is )?{said}"):
        imports(path, size=60000)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.ds", "is a token file of datatrove; import it: .* format=datatrove"),
        ("a.npy", "is a token file without a header, as OLMo-core writes it; import it: .* dtype=uint16"),
        ("web_document.bin", "has an .idx beside it, as Megatron's files do; give format=megatron"),
    ],
)
def test_token_files_of_others_are_told_by_name(imports, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "web_document.idx").touch()
    with pytest.raises(ConfigError, match=said):
        imports(raw(tmp_path / name, "uint16"))


def arrow(folder: Path) -> None:
    datasets.Dataset.from_dict({"text": ["some text"]}).save_to_disk(str(folder))


def splits(folder: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["some text"]})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(folder))


def indexed(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
        (folder / name).write_bytes(b"\0" * 64)

    return make


FOLDERS = {
    "save_to_disk": (arrow, r"an Arrow dataset of Hugging Face's save_to_disk; .*load_from_disk\('.*in'\)\.to_parquet"),
    "its splits": (splits, r"save_to_disk; write it as Parquet: .*load_from_disk\('.*in'\)\['train'\]\.to_parquet\("),
    "MDS": (indexed("shard.00000.mds"), r"MosaicML's streaming \(MDS\); .*'text'.*streaming\.LocalDataset\('.*in'\)"),
    "compressed MDS": (indexed("shard.00000.mds.zstd"), r"MosaicML's streaming \(MDS\)"),
    "LitData": (indexed("chunk-0-0.bin"), "a dataset of LitData; .*TokensLoader"),
}
READERS = {
    "input": lambda path: find_sources(str(path), "auto"),
    "data.path": lambda path: find_files(str(path)),
}


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("key", [*READERS, "import"])
def test_a_folder_of_another_tool_is_named_with_the_way_to_convert_it(imports, tmp_path, key: str, case: str) -> None:
    make, said = FOLDERS[case]
    make(tmp_path / "in")
    with pytest.raises(ConfigError, match=f"^{key}: {tmp_path}/in is {said}" if case.startswith("save") else said):
        READERS.get(key, imports)(tmp_path / "in")


def test_parquet_as_advised_is_read(tmp_path: Path) -> None:
    arrow(tmp_path / "in")
    datasets.load_from_disk(str(tmp_path / "in")).to_parquet(tmp_path / "text.parquet")
    (source,) = find_sources(str(tmp_path / "text.parquet"), "auto")
    assert source.format == "parquet"


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("name", ["a.arrow", "a.mds", "a.ds", "a.npy", "a.npz", "a.bin", "a.idx"])
def test_a_file_of_another_tool_is_not_text(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"\0\0")
    with pytest.raises(ConfigError, match=f"^{key}: .*{name} is a"):
        READERS[key](tmp_path / name)
    assert find_sources(str(tmp_path / name), "text")[0].format == "text"  # said to be text
