"""`gptlite data`, as a user calls it."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from run_files import snapshot
from token_folders import write_folder, write_megatron

from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.satellites.data_tool import command
from gptlite.satellites.data_tool.inspect import histogram, plot_lengths

TEXTS = {"train": ["a cat", "", "the mat lay under the dog"], "val": ["no cat"]}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A prepared folder of bytes."""
    return write_folder(tmp_path / "mine", **TEXTS)


def row(out: str, start: str) -> list[str]:
    return next(line for line in out.splitlines() if line.strip().startswith(start)).split()


def test_inspect_prints_counts_lengths_and_tokenizer(tool, folder):
    result = tool("inspect", folder)
    assert result.code == 0
    assert row(result.out, f"{folder}/train")[1:5] == ["3", "33", "1.000", "uint16"]
    assert row(result.out, f"{folder}/val")[1:5] == ["1", "7", "1.000", "uint16"]
    lengths = [line.split() for line in result.out.splitlines() if f"{folder}/train" in line][1]
    assert lengths[1:] == ["1", "2", "6", "11", "22", "26", "26"]  # of 1, 6 and 26 tokens
    assert "4 - 7 tokens" in result.out
    assert "byte, vocabulary 257, end of document 256, fingerprint" in result.out
    assert snapshot(folder).keys() == {f"{split}{end}" for split in TEXTS for end in (".bin", ".idx", ".meta.json")} | {
        "tokenizer/definition.json"
    }


def test_inspect_as_json_and_of_one_dataset(tool, folder):
    for path in (folder / "train", folder / "train.bin", folder / "train.idx"):
        found = json.loads(tool("inspect", path, "json=true").out)["datasets"]
        assert [each["prefix"] for each in found] == [str(folder / "train")]
        assert found[0]["lengths"]["max"] == 26


def test_inspect_draws_the_lengths(tool, folder, tmp_path):
    result = tool("inspect", folder, f"plot={tmp_path / 'new' / 'lengths.png'}")
    assert result.code == 0
    assert (tmp_path / "new" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    refused = tool("inspect", folder, "plot=lengths.doc")
    assert (refused.code, "plot=lengths.doc is not an image file" in refused.err) == (2, True)


def test_a_short_axis_of_lengths_has_plain_labels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_: drawn.append(figure))
    plot_lengths({"a": np.array([900, 1500, 3000])}, tmp_path / "a.png")
    drawn[0].draw_without_rendering()
    labels = [drawn[0].axes[0].get_xticklabels(minor=minor) for minor in (False, True)]
    words = "".join(label.get_text() for each in labels for label in each)
    assert "1,0002,000" in words
    assert "$" not in words


def test_inspect_says_what_is_damaged_and_shows_the_rest(tool, folder):
    (folder / "val.idx").write_bytes(b"x")
    result = tool("inspect", folder)
    assert result.code == 1
    assert row(result.out, f"{folder}/train")[2] == "33"
    assert f"DAMAGED  {folder}/val.idx is damaged: it does not begin with" in result.out


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([0, 0], [("0", 2)]),
        ([1, 1, 3], [("1", 2), ("2 - 3", 1)]),
        ([0, 4, 7, 8, 1023, 1024], {"0": 1, "4 - 7": 2, "8 - 15": 1, "512 - 1,023": 1, "1,024 - 2,047": 1}),
    ],
)
def test_the_histogram_is_of_powers_of_two(lengths, expected):
    counts = list(histogram(np.array(lengths, dtype=np.int64)))
    assert [each for each in counts if each[1]] == (list(expected.items()) if isinstance(expected, dict) else expected)


def test_verify_passes_what_is_whole(tool, folder):
    result = tool("verify", folder)
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == ["ok", "ok", "2"]
    assert "3 documents, 33 tokens" in result.out


def other_tokenizer(folder):
    (folder / "tokenizer" / "definition.json").write_text('{"kind": "numbers", "vocab_size": 300}')


def other_dtype(folder):
    with IndexedWriter(folder / "val", "", 100_000, 99_999) as writer:
        writer.end_document()
    (folder / "tokenizer" / "definition.json").unlink()
    (folder / "tokenizer").rmdir()


def change(name, offset, value):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[offset] = value
        (folder / name).write_bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message", "intact"),
    [
        (change("train.bin", 0, 7), "train.bin is damaged: its sha256 is", 1),
        (change("train.bin", 1, 7), "token 0 is 1889, outside the vocabulary of 257", 1),
        (change("train.idx", 0, 7), "train.idx is damaged: it does not begin with", 1),
        (lambda folder: (folder / "val.bin").unlink(), "val.bin is damaged: it cannot be opened", 1),
        (other_tokenizer, "but tokenizer/ has", 0),
        (lambda folder: (folder / "tokenizer" / "definition.json").write_text("{"), "has no readable tokenizer", 0),
        (other_dtype, "val.bin has dtype int32", 1),
    ],
    ids=["hash", "vocabulary", "magic", "missing", "tokenizer", "no tokenizer", "dtypes"],
)
def test_verify_names_the_damage_and_returns_1(tool, folder, damage, message, intact):
    damage(folder)
    result = tool("verify", folder)
    assert result.code == 1
    assert message in result.out
    assert result.out.splitlines()[-1] == f"{intact} of 2 intact"
    assert result.err == ""


def test_verify_of_megatrons_own_files_says_what_it_cannot_know(tool, tmp_path):
    write_megatron(tmp_path / "m", [[[1, 70_000]]], np.int32)
    assert "no .meta.json: hash and vocabulary not checked" in tool("verify", tmp_path / "m").out
    result = tool("verify", tmp_path / "m.bin", "vocab_size=65536")
    assert (result.code, "token 1 is 70000, outside the vocabulary of 65536" in result.out) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspekt", "x"], "; did you mean inspect?"),
        (["inspect"], "inspect takes PATH ...; 0 paths given"),
        (["verify", "/nowhere"], "/nowhere does not exist; give a prepared folder"),
        (["inspect", "/"], "/ holds no .idx"),
        (["verify", "x", "speed=1"], "speed"),
    ],
)
def test_refusals_are_one_line_and_exit_2(tool, arguments, message):
    result = tool(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_has_help(tool, name):
    result = tool(name, "--help")
    assert result.code == 0
    assert f"{name} PATH" in result.out
