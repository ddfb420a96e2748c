"""Input that is no text: counted and named, or refused; never a wrong token."""

import gzip
import json
import lzma
import os
import resource
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError
from gptlite.tokenizers.base import NumberTokenizer
from preprocess.corpora import as_jsonl, made_up, prepare, read_documents

GOOD = made_up(1, 6)
BAD_LINES = {
    "no JSON": (b"{'text': 1}", "it is not JSON: Expecting property name enclosed in double quotes at column 2"),
    "cut off": (b'{"text": "abc', "it is not JSON: Unterminated string starting at at column 10"),
    "half a line": (b'"text": "a"}', "it is not JSON: Extra data at column 7"),
    "no fields": (b"{}", "it has no field text; its fields: none"),
    "a list": (b'{"text": ["a"]}', "its field text is a array, not a string"),
    "UTF-8 cut off": (b'{"text": "\xe6\xbc"}', "it is not UTF-8 at byte 10 (0xe6)"),
    "an array": (b'["text"]', "it is a JSON array, not an object"),
    "a string": (b'"text"', "it is a JSON string, not an object"),
    "no field": (b'{"body": "x", "n": 1}', "it has no field text; its fields: body, n"),
    "a number": (b'{"text": 7}', "its field text is a number, not a string"),
    "null": (b'{"text": null}', "its field text is a null, not a string"),
    "Latin-1": (b'{"text": "na\xefve"}', "it is not UTF-8 at byte 12 (0xef)"),
    "UTF-16": ('{"text": "x"}'.encode("utf-16"), "it is not UTF-8 at byte 0 (0xff)"),
    "half a pair": (b'{"text": "\\ud83d"}', "it has half of a surrogate pair, which is not valid text"),
    "encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "it is not UTF-8 at byte 10 (0xed)"),
    "overlong": (b'{"text": "\xc0\x80"}', "it is not UTF-8 at byte 10 (0xc0)"),
    "deep": (b'{"text": ' + b"[" * 100_000, "its JSON is nested too deeply"),
    "a huge number": (b'{"text": ' + b"1" * 5000 + b"}", "Exceeds the limit (4300 digits) for integer"),
    "NUL bytes": (b"\0" * 50, "it is not JSON: Expecting value at column 1"),
    "a raw NUL": (b'{"text": "a\0b"}', "it is not JSON: Invalid control character at at column 12"),
    "long": (json.dumps({"text": "x" * 300_000}).encode(), "it is longer than max_record_bytes=200000"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_refused_or_left_out(tmp_path: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl(GOOD[:3]) + b"\n" + line + b"\n" + as_jsonl(GOOD[3:]))
    options = {"validation_fraction": 0, "max_record_bytes": 200_000}
    with pytest.raises(ConfigError) as error:
        prepare(path, tmp_path / "out", **options)
    assert str(error.value).startswith(f"{path}:5: {reason}")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    result = prepare(path, tmp_path / "out", on_error="skip", log=said.append, **options)
    assert (result.counts.documents, result.counts.skipped) == (6, 1)
    assert read_documents(tmp_path / "out", "train") == GOOD
    (noted,) = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert (noted["file"], noted["line"]) == (str(path), 5)
    assert noted["reason"].startswith(reason)
    assert f"skipped {path}:5: {reason}" in said[-1]


def test_control_characters_and_line_ends_are_kept(tmp_path: Path) -> None:
    """NUL and other control characters, a byte order mark inside, Windows lines, characters beyond the BMP."""
    texts = ["a\0b", "\x01\x7f\x85\u2028", "\ufeffx", "a\r\nb\r", "😀", "\ufffd"]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(texts).replace(b"\n", b"\r\n"))
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    prepare(tmp_path, tmp_path / "out", validation_fraction=0)
    assert read_documents(tmp_path / "out", "train") == [*texts, "a\0b"]


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
DAMAGES = {
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "its end cut off": lambda data: data[:-20],
    "a bit turned": lambda data: data[: (half := len(data) // 2)] + bytes([data[half] ^ 16]) + data[half + 1 :],
    "another end": lambda data: data[:-3] + b"xyz",
    "cut in its header": lambda data: data[:3],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_file_is_named_and_gives_no_half_document(
    source, tmp_path, monkeypatch, suffix: str, damage: str
) -> None:
    turned = damage == "a bit turned"  # which the checksum tells, at the end of all that is decompressed at a time
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks.BLOCK", 1 << 20 if turned else 1000)
    path, texts = source / f"a.jsonl{suffix}", made_up(2, 50 if turned else 200)
    path.write_bytes(DAMAGES[damage](COMPRESS[suffix](as_jsonl(texts))))
    (source / "b.jsonl").write_bytes(as_jsonl(GOOD))
    with pytest.raises(ConfigError, match=r"a.jsonl\S*: it ") as error:
        prepare(source, tmp_path / "out", validation_fraction=0)
    assert "\n" not in str(error.value)
    result = prepare(source, tmp_path / "out", validation_fraction=0, on_error="skip")
    assert result.counts.skipped >= 1
    found = read_documents(tmp_path / "out", "train")
    assert found[-6:] == GOOD
    assert found[:-6] == texts[: len(found) - 6]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_that_are_not_compressed_after_all_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(as_jsonl(GOOD))
    prepare(tmp_path, tmp_path / "out", validation_fraction=0)
    assert read_documents(tmp_path / "out", "train") == GOOD


@pytest.mark.parametrize("content", [b"", b" \n\t\n \n", as_jsonl(["", ""])], ids=["empty", "white space", "no text"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_without_anything_in_it_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(ConfigError, match="no document with text"):
        prepare(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.mkdir()])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, make) -> None:
    make(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"a\.jsonl (is not a regular file|holds no files)"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")


@pytest.mark.parametrize("part", [50, 1 << 20])
def test_text_that_is_not_utf8_is_left_out_whole(source: Path, tmp_path: Path, monkeypatch, part) -> None:
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks._PART", part)
    for name, content in (
        ("a", b"good one\n"),
        ("b", b"fine\n" * 30 + b"na\xefve\n" + b"fine\n" * 30),
        ("c", b"good two\n" * 30),
    ):
        (source / f"{name}.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"b.txt:31: it is not UTF-8 at byte 152 \(0xef\)"):  # of the file
        prepare(source, tmp_path / "out", validation_fraction=0)
    result = prepare(source, tmp_path / "out", validation_fraction=0, on_error="skip")
    assert (result.counts.documents, result.counts.skipped) == (2, 1)
    assert read_documents(tmp_path / "out", "train") == ["good one\n", "good two\n" * 30]


@pytest.mark.parametrize("separator", ["blank", "---\n"])
@pytest.mark.parametrize("block", [20, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_of_one_of_several_documents_is_counted_in_the_file(
    tmp_path: Path, monkeypatch, separator: str, block: int, mark: bytes
) -> None:
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks.BLOCK", block)
    end = b"\n\n\n" if separator == "blank" else b"\n---\n"
    content = mark + (b"fine" + end) * 20 + b"na\xefve" + end + b"fine"
    (tmp_path / "a.txt").write_bytes(content)
    said = rf"not UTF-8 at byte {content.index(bytes([0xEF]) + b've')} \(0xef\)"
    with pytest.raises(ConfigError, match=said):
        prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0, separator=separator)


@pytest.mark.parametrize("part", [50, 1 << 20])
def test_a_compressed_text_that_is_cut_off_is_left_out_whole(
    source: Path, tmp_path: Path, monkeypatch, part: int
) -> None:
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks._PART", part)
    (source / "a.txt.gz").write_bytes(gzip.compress("".join(made_up(3, 20)).encode())[:-30])
    (source / "b.txt").write_text("good\n" * 30)
    prepare(source, tmp_path / "out", validation_fraction=0, on_error="skip")
    assert read_documents(tmp_path / "out", "train") == ["good\n" * 30]


def test_rows_of_parquet_that_are_no_text(source: Path, tmp_path: Path) -> None:
    rows = [b"good", None, b"na\xefve", b"", b"fine"]
    parquet.write_table(pa.table({"text": pa.array(rows, pa.binary())}), source / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet:2: its text is null"):
        prepare(source, tmp_path / "out", validation_fraction=0)
    result = prepare(source, tmp_path / "out", validation_fraction=0, on_error="skip")
    assert (result.counts.documents, result.counts.skipped, result.counts.empty) == (2, 2, 1)
    assert read_documents(tmp_path / "out", "train") == ["good", "fine"]


def test_files_that_are_no_parquet_of_strings(source: Path, tmp_path: Path) -> None:
    (source / "a.parquet").write_bytes(b"PAR1 not really")
    parquet.write_table(pa.table({"body": ["x"]}), source / "b.parquet")
    parquet.write_table(pa.table({"text": [1]}), source / "c.parquet")
    parquet.write_table(pa.table({"text": GOOD * 99}), source / "cut.parquet")
    (source / "cut.parquet").write_bytes((source / "cut.parquet").read_bytes()[:-20])
    (source / "empty.parquet").touch()
    parquet.write_table(pa.table({"text": ["good"]}), source / "z.parquet")
    said: list[str] = []
    prepare(source, tmp_path / "out", validation_fraction=0, on_error="skip", log=said.append)
    assert read_documents(tmp_path / "out", "train") == ["good"]
    unreadable = "it cannot be read as Parquet"
    reasons = {
        "a": unreadable,
        "b": "it has no column text; give field= one of body",
        "c": "its column text has type int64",
        "cut": unreadable,
        "empty": unreadable,
    }
    assert len(said) == len(reasons)
    for line, (name, reason) in zip(said, reasons.items(), strict=True):
        assert f"{name}.parquet:1: {reason}" in line
        assert "\n" not in line


def test_a_missing_package_is_named(source: Path, tmp_path: Path, monkeypatch) -> None:
    (source / "a.jsonl.zst").write_bytes(zstandard.compress(as_jsonl(GOOD)))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"a .zst file needs a missing package; pip install zstandard"):
        prepare(source, tmp_path / "out")


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_left_out_without_being_held(tmp_path: Path) -> None:
    """Read as 64 MiB of gzip, which costs no disk. Memory is compared with that before."""
    path = tmp_path / "a.jsonl.gz"
    block = gzip.compress(b"x" * (1 << 26), compresslevel=1)
    with open(path, "wb") as file:
        file.write(gzip.compress(as_jsonl(GOOD[:3]) + b'{"text": "'))
        for _ in range(16):
            file.write(block)
        file.write(gzip.compress(b'"}\n' + as_jsonl(GOOD[3:])))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = prepare(path, tmp_path / "out", validation_fraction=0, on_error="skip", max_record_bytes=1 << 25)
    assert (result.counts.documents, result.counts.skipped) == (6, 1)
    assert read_documents(tmp_path / "out", "train") == GOOD
    assert json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["line"] == 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("size", [65_499, 65_500, 65_535, 65_536])
def test_a_long_text_keeps_its_ids_at_every_size_of_the_vocabulary(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks._PART", 50)
    (source / "a.txt").write_text(text := "65498 7\n1\n" * 30)
    NumberTokenizer(size).save(tmp_path / "tokenizer")
    prepare(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), validation_fraction=0)
    assert IndexedDataset(tmp_path / "out" / "train").tokens.tolist() == [*map(int, text.split()), size - 1]
