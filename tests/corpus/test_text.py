"""Text files: found, checked, cut."""

import pytest

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.text import Span, find_files, scan, split_text


def test_blocks_join_to_the_text_and_end_with_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("gptlite.satellites.corpus.text._BLOCK", 10)
    text = "漢字かな\nshort\n" * 20 + "one very long line without an end 😀"
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    blocks = list(Span(path, 0, path.stat().st_size))
    assert "".join(blocks) == text
    assert len(blocks) > 10
    assert all(block.endswith("\n") for block in blocks[:-1])


@pytest.mark.parametrize("text", ["line\n" * 100, "漢" * 500, "a\n" + "é" * 300, "x", "ab", "\n\n"])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_a_cut_loses_nothing_and_falls_between_characters(tmp_path, text, fraction):
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    train, held_out = split_text(path, fraction)
    assert "".join(train) + "".join(held_out) == text
    assert abs(held_out.size - fraction * path.stat().st_size) <= 5


def test_a_cut_falls_after_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 30)
    train, held_out = split_text(path, 0.1)
    assert "".join(train).endswith("\n")
    assert "".join(held_out) == "some words\n" * 3


@pytest.mark.parametrize("block", [3, 7, 1 << 20])
@pytest.mark.parametrize("before", ["", "漢字", "a" * 20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe6\xbc", b"\xc3("])
def test_the_byte_that_is_not_utf8_is_named_wherever_blocks_end(tmp_path, monkeypatch, block, before, bad):
    monkeypatch.setattr("gptlite.satellites.corpus.text._BLOCK", block)
    path = tmp_path / "latin.txt"
    path.write_bytes(before.encode() + bad)
    with pytest.raises(ConfigError) as error:
        scan([path])
    assert f"latin.txt is not UTF-8 at byte {len(before.encode())} (0x{bad[0]:02x})" in str(error.value)


def test_hash_is_of_the_contents_and_of_where_files_end(tmp_path):
    a, b, c, d = (tmp_path / name for name in "abcd")
    for path, text in zip((a, b, c, d), ("one", "two", "on", "etwo"), strict=True):
        path.write_text(text)
    assert scan([a, b]) == scan([a, b])
    assert len({scan([a, b]), scan([b, a]), scan([a]), scan([c, d])}) == 4


@pytest.mark.parametrize("target", ["gone.txt", "a.txt"], ids=["dangling", "looping"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, target):
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "a.txt").symlink_to(target)
    with pytest.raises(ConfigError, match=f"a.txt is a broken link to {target}; repair or remove it"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.txt.gz"])
def test_records_are_not_trained_on_as_text(tmp_path, name):
    (tmp_path / name).write_text('{"text": "a"}\n' * 99)
    for refuse in (lambda path: find_files(path), lambda path: load(["data=text", f"data.path={path}"])):
        with pytest.raises(ConfigError, match=r"not plain text; tokenize it: .*preprocess.* input=.*, and train"):
            refuse(str(tmp_path / name))


def test_a_folder_is_its_text_files_in_order(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \.txt files"):
        find_files(str(tmp_path))
    (tmp_path / "deeper").mkdir()
    for name in ("b.txt", "a.txt", "deeper/c.txt", "notes.md"):
        (tmp_path / name).write_text("x")
    assert find_files(str(tmp_path)) == [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "deeper" / "c.txt"]
