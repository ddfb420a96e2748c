"""Damaged text: each kind is an error that names file and line, or with on_error=skip one counted skip; the documents
around it come through as they are."""

import gzip
import io
import json
import lzma
import os
from pathlib import Path

import pytest
import zstandard

from gptlite.errors import ConfigError
from preprocess.corpora import as_jsonl, made_up, prepare, read_documents

GOOD = ["the first good one", "the last good one, naïve"]
LINES = {
    "invalid JSON": (b'{"text": "a"', "it is not JSON"),
    "half a line of JSON": (b'"text": "a"}', "it is not JSON"),
    "a NUL byte in JSON": (b'{"text": "a\0b"}', "it is not JSON: Invalid control character"),
    "only NUL bytes": (b"\0\0\0\0", "it is not JSON"),
    "invalid UTF-8": (b'{"text": "caf\xe9"}', r"it is not UTF-8 at byte 13 \(0xe9\)"),
    "UTF-8 cut in a character": (b'{"text": "\xe6\xbc"}', r"it is not UTF-8 at byte 10 \(0xe6\)"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "it is not UTF-8 at byte 0"),
    "half of a surrogate pair": (b'{"text": "\\ud800"}', "it has half of a surrogate pair"),
    "missing field": (b'{"body": "a", "id": 1}', "it has no field text; its fields: body, id"),
    "no fields": (b"{}", "it has no field text; its fields: none"),
    "field a number": (b'{"text": 7}', "its field text is a number, not a string"),
    "field null": (b'{"text": null}', "its field text is a null, not a string"),
    "field a list": (b'{"text": ["a"]}', "its field text is a array, not a string"),
    "a list": (b'["a"]', "it is a JSON array, not an object"),
    "a string": (b'"a"', "it is a JSON string, not an object"),
    "nested too deep": (b'{"text": ' + b"[" * 100_000 + b"}", "its JSON is nested too deep|it is not JSON"),
    "a long line": (b'{"text": "' + b"a" * 5000 + b'"}', "longer than max_record_bytes=4096"),
}


def both(folder: Path) -> list[str]:
    return read_documents(folder, "train") + read_documents(folder, "val")


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, case: str) -> None:
    line, message = LINES[case]
    first, last = as_jsonl(GOOD).splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(first + line + b"\n" + last)
    options = {"max_record_bytes": 4096} if case == "a long line" else {}
    with pytest.raises(ConfigError, match=f"a.jsonl:2: .*(?:{message})") as error:
        prepare(tmp_path / "a.jsonl", tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()

    result = prepare(tmp_path / "a.jsonl", tmp_path / "skipped", on_error="skip", **options)
    assert sorted(both(tmp_path / "skipped")) == sorted(GOOD)
    assert (result.counts.documents, result.counts.skipped) == (2, 1)
    noted = [json.loads(note) for note in (tmp_path / "skipped" / "skipped.jsonl").read_text().splitlines()]
    assert [note["line"] for note in noted] == [2]


def test_a_nul_byte_in_text_is_a_character_like_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\0b")
    prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0)
    assert both(tmp_path / "out") == ["a\0b"]


@pytest.mark.parametrize("content", ["caf\xe9".encode("latin1"), "text".encode("utf-16")], ids=["latin-1", "UTF-16"])
def test_text_of_another_encoding_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"good line\n" + content)
    with pytest.raises(ConfigError, match=r"a.txt:2: it is not UTF-8 at byte \d+ \(0x"):
        prepare(tmp_path / "a.txt", tmp_path / "out")


COMPRESSED = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
DAMAGES = {
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "a bit turned": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
    "cut in its header": lambda data: data[:3],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_damaged_compression_is_named_and_gives_no_wrong_document(tmp_path: Path, suffix: str, damage: str) -> None:
    texts = made_up(3, 50)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(GOOD))
    path = tmp_path / f"b.jsonl{suffix}"
    compress = COMPRESSED[suffix] if suffix != ".zst" else zstandard.ZstdCompressor(write_checksum=True).compress
    path.write_bytes(DAMAGES[damage](compress(as_jsonl(texts))))
    with pytest.raises(ConfigError) as error:
        prepare(tmp_path, tmp_path / "out")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)

    result = prepare(tmp_path, tmp_path / "skipped", on_error="skip")
    found = both(tmp_path / "skipped")
    assert result.counts.skipped >= 1
    assert set(GOOD) <= set(found)
    assert set(found) <= set(GOOD + texts)


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_lines_that_are_not_compressed_after_all_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(as_jsonl(GOOD))
    prepare(tmp_path, tmp_path / "out")
    assert sorted(both(tmp_path / "out")) == sorted(GOOD)


def parquet(path: Path, columns: dict, cut: int | None = None) -> None:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    sink = io.BytesIO()
    write_table(Table.from_pydict(columns), sink)
    path.write_bytes(sink.getvalue()[:cut])


PARQUET = {
    "without the column": (lambda p: parquet(p, {"body": GOOD}), "text"),
    "column of numbers": (lambda p: parquet(p, {"text": [1, 2]}), "text"),
    "truncated": (lambda p: parquet(p, {"text": GOOD * 99}, -20), "cannot be read"),
    "garbage": (lambda p: p.write_bytes(b"PAR1 and nothing more PAR1"), "cannot be read"),
    "empty": (lambda p: p.write_bytes(b""), "cannot be read"),
}


@pytest.mark.parametrize("case", PARQUET)
def test_damaged_parquet_is_named(tmp_path: Path, case: str) -> None:
    make, message = PARQUET[case]
    make(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=message) as error:
        prepare(tmp_path / "a.parquet", tmp_path / "out")
    assert str(tmp_path / "a.parquet") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_null_in_parquet_is_named_or_skipped(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": [GOOD[0], None, GOOD[1]]})
    with pytest.raises(ConfigError, match=r"a.parquet:2: its text is null"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")
    result = prepare(tmp_path / "a.parquet", tmp_path / "skipped", on_error="skip")
    assert sorted(both(tmp_path / "skipped")) == sorted(GOOD)
    assert result.counts.skipped == 1


@pytest.mark.parametrize("content", [b"", b" \n\t\n \n"], ids=["empty", "white space"])
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


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_one_skip(tmp_path: Path) -> None:
    first, last = as_jsonl(GOOD).splitlines(keepends=True)
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(first + b'{"text": "')
        file.seek(1 << 30, io.SEEK_CUR)  # a hole: NUL bytes that take no disk
        file.write(b'"}\n' + last)
    with pytest.raises(ConfigError, match=r"a.jsonl:2: .*max_record_bytes"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    result = prepare(tmp_path / "a.jsonl", tmp_path / "skipped", on_error="skip")
    assert sorted(both(tmp_path / "skipped")) == sorted(GOOD)
    assert (result.counts.documents, result.counts.skipped) == (2, 1)
