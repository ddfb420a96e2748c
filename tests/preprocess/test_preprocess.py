"""Corpora become the same prepared folder whatever they are packed in, and whoever does the work."""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from marking import marked

from gptlite.commands.preprocess import main
from gptlite.config import load
from gptlite.data.build import prepare as data
from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.write import is_held_out
from gptlite.tokenizers.base import ByteTokenizer
from preprocess.corpora import as_jsonl, made_up, prepare, read_documents, tree

TEXTS = made_up(0, 300)
COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}


def held_out_of(texts: list[str], fraction: float) -> list[bool]:
    return [is_held_out(hashlib.blake2b(text.encode(), digest_size=8).digest(), fraction) for text in texts]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """TEXTS, prepared from plain lines."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    prepare(folder / "a.jsonl", folder / "out")
    return folder / "out"


@pytest.fixture
def command(monkeypatch, tmp_path, capsys) -> Callable[..., tuple[int, str, str]]:
    """`preprocess` of tmp_path/a.jsonl into tmp_path/out: its exit code, and what it printed."""

    def call(*given: str) -> tuple[int, str, str]:
        paths = [f"input={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'out'}"]
        monkeypatch.setattr("sys.argv", ["preprocess", *paths, "tokenizer=byte", "workers=0", *given])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


@pytest.mark.parametrize("target", ["gone.jsonl", "b.jsonl"], ids=["dangling", "looping"])
@pytest.mark.parametrize("given", ["", "/*.jsonl", "/b.jsonl"], ids=["folder", "glob", "file"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, target: str, given: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    (tmp_path / "in" / "b.jsonl").symlink_to(target)
    with pytest.raises(ConfigError, match=rf"input: .*b.jsonl is a broken link to {target};"):
        prepare(f"{tmp_path}/in{given}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EROFS, 2, "out cannot be written ({path}: read-only file system); give another output="),
        (errno.ENOSPC, 1, "{path}: no space left on device; fix the problem, and run the same command to continue"),
    ],
    ids=["read-only", "full"],
)
def test_what_the_disk_refuses_is_named_with_what_helps(monkeypatch, tmp_path, command, number, code, words) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    partial = tmp_path / "out.partial"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(partial) if number == errno.EROFS else None)

    monkeypatch.setattr(
        "gptlite.satellites.preprocess.run.Output" if number == errno.ENOSPC else "pathlib.Path.mkdir", refuse
    )
    ended, _, errors = command()
    assert ended == code
    assert words.format(path=partial) in errors


@pytest.mark.parametrize("fraction", ["0.2", "0"])
def test_the_command_prints_how_many_documents_each_split_has(tmp_path, command, fraction: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    held_out = sum(held_out_of(TEXTS, float(fraction)))
    assert (held_out == 0) == (fraction == "0")
    split = f"split: {len(TEXTS) - held_out} training documents, {held_out} for validation"
    for _ in range(2):  # the second time the output is finished already
        code, out, _ = command(f"validation_fraction={fraction}")
        assert code == 0
        assert f"{split} (validation_fraction={float(fraction)})\n" in out


def test_a_corpus_without_held_out_documents_gets_the_fraction_to_rerun_with(tmp_path, command) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS[:50]))
    code, out, _ = command("validation_fraction=1e-9")
    assert code == 0
    assert "run the command again with validation_fraction=0.1 overwrite=true\n" in out
    code, out, _ = command("validation_fraction=0.1", "overwrite=true")
    assert code == 0
    assert "warning" not in out


def test_a_corpus_of_one_document_gets_advice_that_works(tmp_path, command) -> None:
    """With any fraction, one of the splits is empty."""
    text = "".join(f"{line}\n\n" for line in TEXTS)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([text]))
    for fraction, needs in (("0.005", "training needs text for"), ("0.999999", "all documents are held out, and none")):
        code, out, _ = command(f"validation_fraction={fraction}", "overwrite=true")
        assert code == 0
        (warning,) = [line for line in out.splitlines() if line.startswith("warning: ")]
        assert warning.startswith(f"warning: {needs}")
        assert "give 10 documents or more, and run the command again with validation_fraction=0.5" in warning
        with pytest.raises(ConfigError, match="has one document, which is in one split as a whole, so the other is"):
            data(load(["data=tokens", f"data.path={tmp_path / 'out'}", "data.sequence_length=8"]).data, seed=1)
    (tmp_path / "a.jsonl").write_text(text)
    advised = ("format=text", "separator=blank", "validation_fraction=0.5", "overwrite=true")
    assert "give 10 documents or more, e.g. with separator=blank, which" in command(advised[0], advised[-1])[1]
    assert "warning" not in command(*advised)[1]
    assert data(load(["data=tokens", f"data.path={tmp_path / 'out'}", "data.sequence_length=8"]).data, seed=1)


def test_documents_are_there_in_order_each_in_one_split(expected: Path) -> None:
    held_out = held_out_of(TEXTS, 0.2)
    train, val = ([text for text, held in zip(TEXTS, held_out, strict=True) if held is part] for part in (False, True))
    assert read_documents(expected, "train") == train
    assert read_documents(expected, "val") == val
    assert 30 < len(val) < 90
    metas = [IndexedDataset(expected / split).meta for split in ("train", "val")]
    assert sum(meta.text_bytes for meta in metas if meta) == sum(len(text.encode()) for text in TEXTS)
    assert {meta.tokenizer for meta in metas if meta} == {ByteTokenizer().fingerprint}
    assert json.loads((expected / "preprocess.json").read_text())["counts"]["documents"] == 300


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines_are_the_same(expected: Path, tmp_path: Path, suffix: str) -> None:
    halves = [as_jsonl(TEXTS[:100]), as_jsonl(TEXTS[100:])]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(COMPRESS[suffix](half) for half in halves))  # two members, as `cat a.gz b.gz` has
    prepare(path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(expected)


def test_parquet_is_the_same(expected: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({"other": list(range(300)), "body": TEXTS})
    parquet.write_table(table.slice(0, 120), tmp_path / "a.parquet", row_group_size=50)
    parquet.write_table(table.slice(120), tmp_path / "b.parquet", row_group_size=77, compression="zstd")
    prepare(tmp_path, tmp_path / "out", field="body")
    assert tree(tmp_path / "out") == tree(expected)


def test_files_globs_and_lists_are_the_same(expected: Path, tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_bytes(as_jsonl(TEXTS[100 * n : 100 * n + 100]))
    (tmp_path / ".hidden.jsonl").write_text("not JSON")
    (tmp_path / "other.csv").write_text("not text")
    names = ",".join(str(tmp_path / f"{n}.jsonl") for n in range(3))
    for number, given in enumerate((tmp_path, tmp_path / "*.jsonl", names)):
        prepare(given, tmp_path / str(number))
        assert tree(tmp_path / str(number)) == tree(expected)


def test_the_standard_input_is_the_same(expected: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(as_jsonl(TEXTS))))))
    prepare("-", tmp_path / "out", format="jsonl")
    assert tree(tmp_path / "out") == tree(expected)


@pytest.mark.parametrize("separator", ["<|end|>", "\\n--\\n"])
def test_text_with_a_separator_is_the_same(expected: Path, tmp_path: Path, separator: str) -> None:
    text = separator.replace("\\n", "\n").join(TEXTS)
    (tmp_path / "a.txt").write_bytes(text.encode())
    prepare(tmp_path / "a.txt", tmp_path / "out", separator=separator)
    assert tree(tmp_path / "out") == tree(expected)


def test_empty_lines_end_documents_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\none\nmore\n\n\ntwo\r\n\r\nthree\n \t\nfour\n")
    assert prepare(tmp_path, tmp_path / "out", separator="blank", validation_fraction=0).counts.documents == 4
    assert read_documents(tmp_path / "out", "train") == ["one\nmore", "two", "three", "four"]


@pytest.mark.parametrize(("size", "workers"), marked([(50, 0), (1000, 0), (2000, 1), (2000, 2), (2000, 3)], 2, 3))
def test_where_blocks_end_and_workers_do_not_matter(expected, tmp_path: Path, monkeypatch, size, workers) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    (tmp_path / "a.txt").write_bytes("<|end|>".join(TEXTS).encode())
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks.BLOCK", size)
    monkeypatch.setattr("gptlite.satellites.preprocess.run.SAVED_BYTES", 30_000)
    prepare(tmp_path / "a.jsonl", tmp_path / "1", workers=workers)
    prepare(tmp_path / "a.txt", tmp_path / "2", separator="<|end|>", workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(expected)


@pytest.mark.parametrize("part", [64, 100_000, pytest.param(5, marks=pytest.mark.slow)])
def test_long_texts_come_in_parts_cut_between_characters(expected: Path, tmp_path: Path, monkeypatch, part) -> None:
    (tmp_path / "in").mkdir()
    for n, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{n:03}.txt").write_bytes(text.encode())
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks._PART", part)
    monkeypatch.setattr("gptlite.satellites.preprocess.run.SAVED_BYTES", 30_000)
    prepare(tmp_path / "in", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(expected)


def test_the_share_held_out_is_the_one_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([f"document {n}" for n in range(20_000)]))
    for fraction in (0, 0.005, 0.3):
        prepare(tmp_path / "a.jsonl", tmp_path / str(fraction), validation_fraction=fraction)
        dataset = IndexedDataset(tmp_path / str(fraction) / "val")
        # Five standard deviations of the binomial distribution.
        assert abs(dataset.num_documents - 20_000 * fraction) <= 5 * (20_000 * fraction * (1 - fraction)) ** 0.5


def test_finished_is_not_made_again_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS[:50]))
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(TEXTS[50:]))
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    first, times = tree(tmp_path / "out"), (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert prepare(tmp_path / "a.jsonl", tmp_path / "out").counts.documents == 50
    with pytest.raises(ConfigError, match=r"is already finished \(input was .*a.jsonl, now it is .*b.jsonl\)"):
        prepare(tmp_path / "b.jsonl", tmp_path / "out")
    assert (tree(tmp_path / "out"), (tmp_path / "out" / "train.bin").stat().st_mtime_ns) == (first, times)
    prepare(tmp_path / "b.jsonl", tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out"]


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS[:5]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by preprocess"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("input", "options", "message"),
    [
        ("nowhere", {}, "input=.*nowhere matches no file"),
        ("*.csv", {}, "matches no file"),
        ("a.jsonl", {"format": "json"}, "format=json is not one of auto, jsonl, parquet, text; did you mean jsonl"),
        ("-", {}, "input=- needs format=jsonl or format=text"),
        ("a.jsonl", {"separator": "blank"}, "separator=blank is for text"),
        ("a.jsonl", {"validation_fraction": 1}, "validation_fraction=1"),
        ("a.jsonl", {"on_error": "ignore"}, "on_error=ignore is neither"),
        ("a.jsonl", {"workers": -1}, "workers=-1"),
        ("a.jsonl", {"max_record_bytes": 0}, "max_record_bytes=0"),
        ("a.jsonl", {"field": ""}, "field= is empty"),
        ("a.jsonl,a.jsonl", {}, "a.jsonl twice"),
        ("empty", {}, "holds no files ending in"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, monkeypatch, input: str, options: dict, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS[:5]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message) as error:
        prepare(input, tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_output_among_the_input_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS[:5]))
    prepare(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="which is inside the output"):
        prepare(tmp_path, tmp_path / "out", overwrite=True)
