"""Token files of nanoGPT, llm.c and Megatron become prepared folders, token for token."""

import sys

import numpy as np
import pytest
from token_folders import write_megatron as megatron

from gptlite.data.folder import open_split
from gptlite.data.indexed import IndexedDataset
from gptlite.satellites.data_tool import command
from gptlite.satellites.data_tool.verify import verify
from gptlite.tokenizers.base import NumberTokenizer, load_tokenizer

EOD = 99
DOCUMENTS = [[5, 6, 7], [], [8], [98, 0, 98], [1] * 20]


@pytest.fixture
def tokenizer(tmp_path):
    """A vocabulary of 100, its last id the end of document."""
    NumberTokenizer(100).save(tmp_path / "numbers")
    return tmp_path / "numbers"


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path, tokenizer):
    """Imports into tmp_path/out, all documents for training unless the arguments say otherwise."""

    def call(path, *arguments):
        given = ["data.py", "import", str(path), f"output={tmp_path / 'out'}", f"tokenizer={tokenizer}", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as end:
            command.main()
        return end.value.code or 0, *capsys.readouterr()

    return call


def documents(folder, split="train"):
    dataset = open_split(folder, split, load_tokenizer(folder / "tokenizer"))
    verify(dataset)
    return [dataset.document(n).tolist() for n in range(dataset.num_documents)]


def ended(bodies):
    return [[*body, EOD] for body in bodies]


def joined(lists):
    return [token for each in lists for token in each]


def nanogpt(path, tokens):
    path.write_bytes(np.array(tokens, dtype="<u2").tobytes())
    return path


def llmc(path, tokens, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=dtype).tobytes())
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_nanogpts_documents_end_with_the_end(tool, tmp_path, monkeypatch, block):
    monkeypatch.setattr("gptlite.satellites.data_tool.foreign._BLOCK", block)
    tokens = joined(ended(DOCUMENTS))
    code, out, _ = tool(nanogpt(tmp_path / "x.bin", tokens), "format=nanogpt", "validation_fraction=0")
    assert code == 0
    assert documents(tmp_path / "out") == ended(DOCUMENTS)
    assert documents(tmp_path / "out", "val") == []
    assert "was added" not in out


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("form", [{}, {"magic": 20240801, "version": 7, "dtype": "<u4"}], ids=["gpt-2", "llama-3"])
def test_llmcs_documents_begin_with_the_end_and_go_on_in_the_next_file(tool, tmp_path, monkeypatch, block, form):
    monkeypatch.setattr("gptlite.satellites.data_tool.foreign._BLOCK", block)
    tokens = joined([EOD, *body] for body in DOCUMENTS)
    llmc(tmp_path / "x_000001.bin", tokens[:13], **form)
    llmc(tmp_path / "x_000002.bin", tokens[13:14], **form)
    llmc(tmp_path / "x_000003.bin", tokens[14:], **form)
    code, out, _ = tool(tmp_path / "x_*.bin", "format=llmc", "validation_fraction=0")
    assert code == 0
    assert documents(tmp_path / "out") == ended(DOCUMENTS)
    assert "was added" not in out  # every token is one of theirs: the first end is now the last


def test_a_folder_has_both_parts(tool, tmp_path):
    (tmp_path / "in").mkdir()
    nanogpt(tmp_path / "in" / "train.bin", [1, 2, EOD])
    nanogpt(tmp_path / "in" / "val.bin", [3, EOD, 4])
    code, out, _ = tool(tmp_path / "in", "format=nanogpt")
    assert code == 0
    assert documents(tmp_path / "out") == [[1, 2, EOD]]
    assert documents(tmp_path / "out", "val") == [[3, EOD], [4, EOD]]
    assert "added the end-of-document token, 99, to 1 document" in out


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_megatrons_sequences_are_joined_and_ends_added(tool, tmp_path, monkeypatch, at_a_time, dtype, suffix):
    monkeypatch.setattr("gptlite.satellites.data_tool.foreign._DOCUMENTS", at_a_time)
    bodies = [[[1, 2], [3, EOD]], [], [[4]], [[]], [[5, 6, EOD]]]
    prefix = megatron(tmp_path / "web_text_document", bodies, dtype)
    path = prefix.with_name(prefix.name + suffix)
    code, out, _ = tool(path, "format=megatron", "validation_fraction=0")
    assert code == 0
    assert documents(tmp_path / "out") == [[1, 2, 3, EOD], [4, EOD], [5, 6, EOD]]
    assert "left out: 2 empty documents" in out
    assert "to 1 document" in out
    assert IndexedDataset(tmp_path / "out" / "train").dtype == np.uint16


def test_held_out_documents_are_a_share_by_hash(tool, tmp_path):
    random = np.random.default_rng(0)
    bodies = random.integers(0, 99, (4000, 5)).tolist()
    bodies += bodies[:500]  # equal ones go the same way
    tokens = joined(ended(bodies))
    code, _, _ = tool(nanogpt(tmp_path / "x.bin", tokens), "format=nanogpt", "validation_fraction=0.1")
    assert code == 0
    train, val = documents(tmp_path / "out"), documents(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(ended(bodies))
    assert not set(map(tuple, train)) & set(map(tuple, val))
    assert abs(len(val) / len(bodies) - 0.1) < 4 * (0.1 * 0.9 / 4000) ** 0.5


DAMAGE = {
    "odd number of bytes": ("nanogpt", lambda p: p.write_bytes(b"abc"), "has 3 bytes, not a whole number of uint16"),
    "no tokens": ("nanogpt", lambda p: p.write_bytes(b""), "holds no tokens"),
    "a folder without files": ("nanogpt", lambda p: p.mkdir(), "holds no *train*.bin"),
    "nothing there": ("nanogpt", lambda p: None, "does not exist"),
    "another vocabulary": (
        "nanogpt",
        lambda p: nanogpt(p, [1, 50256]),
        "token 1 is 50256, outside the vocabulary of 100",
    ),
    "llm.c's header missing": ("llmc", lambda p: p.write_bytes(b"abc"), "fewer than the 1024 of llm.c's header"),
    "another magic": ("llmc", lambda p: llmc(p, [1], magic=20240522), "magic 20240522 and version 1, not llm.c's"),
    "a future version": ("llmc", lambda p: llmc(p, [1], version=2), "magic 20240520 and version 2, not llm.c's"),
    "fewer tokens than it says": ("llmc", lambda p: llmc(p, [1], count=2), "has 1026 bytes, but its header gives 2"),
    "a negative number of tokens": ("llmc", lambda p: llmc(p, [], count=-1), "but its header gives -1 tokens"),
    "nanoGPT's as llm.c's": ("llmc", lambda p: nanogpt(p, [1] * 600), "begins with magic 65537 and version 65537"),
    "sequences of pictures": (
        "megatron",
        lambda p: megatron(p, [[[1]], [[2]]], modes=[0, 1]),
        "with a mode other than text",
    ),
    "a megatron prefix that is not there": ("megatron", lambda p: None, "idx is damaged: it cannot be opened"),
    "ids beyond the vocabulary": ("megatron", lambda p: megatron(p, [[[1]], [[101]]]), "token 1 is 101, outside"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_left(tool, tmp_path, case):
    form, damage, message = DAMAGE[case]
    damage(tmp_path / "source")
    before = sorted(tmp_path.iterdir())
    code, out, err = tool(tmp_path / "source", f"format={form}")
    assert (code, out) == (2, "")
    assert str(tmp_path / "source") in err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("format=nanogtp", "did you mean nanogpt?"),
        ("validation_fraction=1", "validation_fraction=1.0 must be at least 0 and below 1"),
        ("tokenizer=/nowhere", "/nowhere"),
        ("validation=/nowhere", "/nowhere does not exist"),
        ("validation_fraction=0.005", "holds out none of 1 document; give validation=PATH"),
        ("validation_fraction=0.9999999999", "holds out all documents; lower it, or give validation=PATH"),
        ("output=.", "output=. exists; nothing is overwritten, give a new folder"),
    ],
)
def test_an_import_with_wrong_settings_is_refused_and_writes_nothing(tool, tmp_path, argument, message):
    code, _, err = tool(nanogpt(tmp_path / "x.bin", [1, EOD]), "format=nanogpt", argument)
    assert (code, message in err) == (2, True)
    assert not (tmp_path / "out").exists()
