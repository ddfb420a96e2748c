"""Preparing: once, whole or not at all, and every wrong input in one line."""

import errno
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gptlite
from gptlite.data.build import build_loader, prepare
from gptlite.data.check import check_settings
from gptlite.data.config import DataConfig, TokensConfig
from gptlite.data.indexed import IndexedDataset
from gptlite.data.registry import kind_of
from gptlite.errors import ConfigError
from gptlite.ops.inputs import IGNORE
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.corpus import cache
from gptlite.satellites.corpus import prepare as preparation
from gptlite.satellites.corpus.config import CorpusConfig, TextConfig
from gptlite.satellites.corpus.recipes import recipe_digest
from gptlite.satellites.corpus.text import Span

TEXT = "".join(f"line {n}: to be, or not to be 😀 漢字\t?\n" for n in range(400))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def settings(tmp_path):
    return {"cache_dir": str(tmp_path / "cache"), "sequence_length": 16}


@pytest.fixture
def config(text, settings):
    return TextConfig(path=str(text), tokenizer="char", **settings)


def left(folder):
    """Prepared and temporary folders, without locks and notes of digests."""
    return [path.name for path in Path(folder).glob("*") if not path.name.startswith((".lock-", ".digest-"))]


@pytest.mark.parametrize("kind", ["sentencepiece", "char", "byte"])
def test_text_becomes_two_parts_that_join_to_it_and_bits_per_byte_divides_by_the_second(text, settings, kind):
    data = prepare(TextConfig(path=str(text), tokenizer=kind, vocab_size=400, **settings), seed=1)
    train, validation = data.sets[0].train, data.sets[0].validation
    held_out = data.tokenizer.decode(validation.tolist())
    assert data.tokenizer.decode(train.tolist()) + held_out == TEXT
    assert len(held_out) == pytest.approx(0.1 * len(TEXT), rel=0.05)
    assert train[-1] == validation[-1] == data.tokenizer.eod
    assert str(data.num_train_tokens) in data.describe().replace(",", "")
    loader = build_loader(DataConfig(**settings), data, Mesh(torch.device("cpu")), seed=1)
    first = data.tokenizer.decode(validation[:1].tolist())  # nothing comes before it: not a target
    assert loader.validation_bytes() == len(held_out.encode()) - len(first.encode())
    counted = sum(int((batch.targets != IGNORE).sum()) for batch in loader.validation_batches())
    assert counted == len(validation) - 1


def test_every_file_is_a_document_and_gives_its_end(tmp_path, settings):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n" * 100)
    (folder / "b.txt").write_text("b\n" * 100)
    (folder / "empty.txt").write_text("")
    data = prepare(TextConfig(path=str(folder), tokenizer="byte", **settings), seed=1)
    eod = data.tokenizer.eod
    assert data.folder is not None
    train, held_out = (IndexedDataset(data.folder / part) for part in ("train", "val"))
    assert train.tokens.tolist() == [*b"a\n" * 90, eod, *b"b\n" * 90, eod]
    assert held_out.tokens.tolist() == [*b"a\n" * 10, eod, *b"b\n" * 10, eod]
    assert train.num_documents == held_out.num_documents == int((data.sets[0].validation == eod).sum()) == 2


def test_the_second_time_it_is_read_from_the_cache(config, monkeypatch):
    first = prepare(config, seed=1)
    monkeypatch.setattr(preparation, "write_split", None)
    second = prepare(config, seed=2)
    assert first.folder == second.folder
    assert first.identity == second.identity
    assert np.array_equal(first.sets[0].train, second.sets[0].train)


def test_the_cache_is_keyed_by_what_makes_a_difference(config, text, tmp_path):
    def folder(**changes):
        return prepare(replace(config, **changes), seed=1).folder

    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(text.read_bytes())
    assert folder() == folder(path=str(copy)) == folder(vocab_size=99) == folder(sequence_length=32)
    longer = tmp_path / "longer.txt"
    longer.write_text(TEXT + "x")
    others = [folder(tokenizer="byte"), folder(validation_fraction=0.2), folder(path=str(longer)), folder()]
    assert len(set(others)) == 4


def test_identity_tells_data_apart(config):
    changes = {}, {"tokenizer": "byte"}, {"sequence_length": 32}
    a, b, c = (prepare(replace(config, **change), seed=1).identity for change in changes)
    assert {key for key in a if a[key] != b[key]} == {"tokenizer", "train", "validation"}
    assert {key for key in a if a[key] != c[key]} == {"sequence_length"}


REFUSED = {  # the text, if there is one; settings; message
    "missing": (None, {}, "data.path=.*text.txt does not exist; give a text file"),
    "empty": (b"", {}, "has no text, only white space"),
    "white space": (b" \n\n ", {}, "has no text, only white space"),
    "not utf-8": (b"caf\xe9 ole", {}, r"text.txt is not UTF-8 at byte 3 \(0xe9\)"),
    "tokenizer": (b"x", {"tokenizer": "chr"}, "did you mean char?"),
    "vocabulary": (b"x", {"vocab_size": 0, "tokenizer": "sentencepiece"}, "data.vocab_size=0 must be"),
    "fraction 0": (b"x", {"validation_fraction": 0.0}, "must be above 0"),
    "fraction 1": (b"x", {"validation_fraction": 1.0}, "below 1"),
    "micro-batch": (b"x", {"micro_batch_size": 0}, "data.micro_batch_size=0"),
    "length": (b"x", {"sequence_length": -1}, "data.sequence_length=-1"),
    "too short": (b"short\n", {}, r"data.sequence_length=16 needs more than 16 .*, but data.path=.*/text.txt has \d"),
    "no room": (b"short\n", {"tokenizer": "sentencepiece", "vocab_size": 9}, "9 is too small"),
    "nothing held out": (b"x" * 100, {"validation_fraction": 1e-9}, "data.validation_fraction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused_in_one_line_and_leaves_nothing(config, text, settings, case):
    content, changes, message = REFUSED[case]
    text.unlink()
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(replace(config, **changes), seed=1)
    assert "\n" not in str(error.value)
    assert left(settings["cache_dir"]) == []


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*file/cache cannot be written"):
        prepare(replace(config, cache_dir=str(tmp_path / "file" / "cache")), seed=1)


def test_a_source_that_cannot_be_read_is_not_the_caches_fault(config, text, settings, monkeypatch):
    """The text is scanned, then taken away before it is tokenized."""
    real = preparation.train_tokenizer

    def taken_away(*arguments):
        text.unlink()
        return real(*arguments)

    monkeypatch.setattr(preparation, "train_tokenizer", taken_away)
    with pytest.raises(ConfigError, match=r"data\.path: .*text\.txt cannot be read \(No such file") as error:
        prepare(config, seed=1)
    assert "cache_dir" not in str(error.value)
    assert left(settings["cache_dir"]) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"could not be prepared in data.cache_dir=.*No space left on device.*; free some space"),
        (
            errno.EIO,
            r"could not be prepared in .*: some\.bin: Input/output error; check the disk .*give another data.cache_dir",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, code, message):
    def make(folder):
        raise OSError(code, os.strerror(code), "some.bin")

    with pytest.raises(ConfigError, match=message) as error:
        cache.cached_folder(tmp_path, "n", {}, make, print)
    assert "cannot be written" not in str(error.value)
    assert left(tmp_path) == []


def test_text_that_shrinks_while_it_is_read_is_refused_not_waited_for(text):
    with pytest.raises(ConfigError, match="became shorter while it was read"):
        list(Span(text, 0, text.stat().st_size + 1))


def test_text_that_changes_while_it_is_prepared_is_not_kept(config, text, settings, monkeypatch):
    real = preparation.write_split

    def touched(*arguments):
        real(*arguments)
        text.write_text(TEXT.replace("line", "LINE"), encoding="utf-8")

    monkeypatch.setattr(preparation, "write_split", touched)
    with pytest.raises(ConfigError, match="changed while it was read"):
        prepare(config, seed=1)
    assert left(settings["cache_dir"]) == []


def test_a_damaged_cache_is_named(config):
    folder = prepare(config, seed=1).folder
    assert folder is not None
    (folder / "val.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"val\.bin is damaged: it has 1 bytes"):
        prepare(config, seed=1)


def test_ctrl_c_leaves_nothing_and_the_next_time_works(config, settings, monkeypatch):
    real = preparation.write_split

    def interrupted(prefix, *rest):
        if prefix.name == "val":
            raise KeyboardInterrupt
        real(prefix, *rest)

    monkeypatch.setattr(preparation, "write_split", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, seed=1)
    assert left(settings["cache_dir"]) == []
    monkeypatch.undo()
    assert prepare(config, seed=1).num_train_tokens > 0


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    def make(folder):
        (folder / "file").write_text("x")

    folder = cache.cached_folder(tmp_path, "n", {}, make, print)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir()
    folder.rename(partial / "whole")
    cache.cached_folder(tmp_path, "n", {}, make, print)
    assert left(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CorpusConfig(corpus="shakespear"), "data.corpus=shakespear has no recipe.*did you mean shakespeare?"),
        (CorpusConfig(corpus="shakespeare", tokenizer="word"), "data.tokenizer=word is not sentencepiece or"),
        (CorpusConfig(corpus="shakespeare", path="/nowhere"), "data.path=/nowhere does not exist"),
    ],
)
def test_wrong_settings_of_a_corpus_are_refused(config, message):
    for refuse in (lambda: check_settings(config), lambda: prepare(config, seed=1)):
        with pytest.raises(ConfigError, match=message):
            refuse()


RECIPE = """
import sys
from pathlib import Path
from gptlite.satellites.corpus.write import train_tokenizer, write_split
from gptlite.progress import Progress
arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
print("said by the recipe")
{action}
folder = Path(arguments["output"])
documents = [["to be or not to be\\n" * 20]]
tokenizer = train_tokenizer("char", 0, documents, documents, print)
tokenizer.save(folder / "tokenizer")
for name in ("train", "val"):
    write_split(folder / name, documents, tokenizer, Progress("", 1, print))
"""


def run_recipe(tmp_path, monkeypatch, settings, action):
    script = tmp_path / "prepare.py"
    script.write_text(RECIPE.format(action=action))
    for module in ("check", "prepare", "recipes"):
        monkeypatch.setattr(f"gptlite.satellites.corpus.{module}.find_recipe", lambda corpus: script)
    said = []
    return prepare(CorpusConfig(corpus="mine", **settings), 1, said.append), said


def test_a_recipe_is_run_and_heard(tmp_path, monkeypatch, settings):
    data, said = run_recipe(tmp_path, monkeypatch, settings, "")
    assert data.num_train_tokens == 20 * 19 + 1
    assert "said by the recipe" in said


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("print('error: data.path=x is wrong; do y', file=sys.stderr); sys.exit(2)", "^data.path=x is wrong; do y$"),
        ("raise RuntimeError('a bug')", "data.corpus=mine: .*prepare.py failed: RuntimeError: a bug"),
        ("sys.exit(0)", "has no readable tokenizer"),
        ("import os; os.abort()", "data.corpus=mine: .*prepare.py failed"),
    ],
)
def test_a_recipe_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch, settings, action, message):
    with pytest.raises(ConfigError, match=message):
        run_recipe(tmp_path, monkeypatch, settings, action)
    assert left(settings["cache_dir"]) == []


def test_checking_needs_no_torch_and_no_numpy():
    code = "import sys, gptlite.satellites.corpus, gptlite.data.check"
    code += "; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": str(Path(gptlite.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_a_kind_is_that_of_the_nearest_class_and_explains_changed_data(tmp_path, config):
    """A run folder asks it without knowing text; other kinds of data have nothing to add."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")

    @dataclass
    class Mine(TextConfig):
        pass

    assert kind_of(Mine()) is kind_of(config)
    assert "linked folder" in kind_of(config).why_changed(Mine(path=str(tmp_path / "texts")))
    assert kind_of(config).why_changed(config) == ""
    assert kind_of(CorpusConfig()).why_changed(CorpusConfig()) == kind_of(TokensConfig()).why_changed(config) == ""


def test_corpora_that_were_cached_before_recipes_imported_this_package_are_still_valid(tmp_path):
    script = tmp_path / "prepare.py"
    script.write_text("from gptlite.data.sources import write_folder\n")
    before = recipe_digest(script)
    assert before == hashlib.sha256(script.read_bytes()).hexdigest()
    script.write_text("from gptlite.satellites.corpus.sources import write_folder\n")
    assert recipe_digest(script) == before
    script.write_text("from gptlite.satellites.corpus.sources import write_folders\n")
    assert recipe_digest(script) != before
