"""openwebtext and fineweb, on a stand-in for the hub: files that the datasets library itself reads and streams."""

import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from preprocess.corpora import read_documents
from recipe_modules import load_recipe

from gptlite.data.build import prepare
from gptlite.errors import ConfigError
from gptlite.progress import Progress
from gptlite.satellites.corpus import streaming
from gptlite.satellites.corpus.config import CorpusConfig
from gptlite.satellites.corpus.streaming import StreamArguments, open_rows, texts, write_stream
from gptlite.satellites.corpus.write import document_hash, is_held_out
from gptlite.tokenizers.base import ByteTokenizer
from gptlite.tokenizers.sentence_piece import train_sentencepiece

ROOT = Path(__file__).parents[2]
TEXTS = [f"Document {n}: the cat sat on mat {n * n}.\n" for n in range(200)]
FRACTION = 0.1


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Two files of FineWeb's columns, one row with an empty text."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    folder = tmp_path_factory.mktemp("fineweb")
    for n, part in enumerate((TEXTS[:120], ["", *TEXTS[120:]])):
        rows = {"text": part, "id": [f"<urn:{n}/{m}>" for m in range(len(part))], "token_count": [9] * len(part)}
        write_table(Table.from_pydict(rows), folder / f"00{n}.parquet", row_group_size=50)
    return folder


@pytest.fixture
def jsonl(tmp_path):
    folder = tmp_path / "owt"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(lines[100:])
    return folder


@pytest.mark.slow
def test_fineweb_from_parquet_into_a_prepared_folder(parquet, tmp_path):
    """The whole way of `data=fineweb`: the recipe as a program, streaming, tokens, splits by hash."""
    config = CorpusConfig(
        corpus="fineweb",
        tokenizer="byte",
        path=str(parquet),
        sequence_length=32,
        cache_dir=str(tmp_path / "cache"),
        arguments={"validation_fraction": str(FRACTION), "max_documents": "150", "sample": None},
    )
    data = prepare(config, seed=1)
    assert data.folder is not None
    held_out = [text for text in TEXTS[:150] if is_held_out(document_hash(text.encode()).digest(), FRACTION)]
    assert 5 <= len(held_out) <= 30
    assert read_documents(data.folder, "val") == held_out
    assert read_documents(data.folder, "train") == [text for text in TEXTS[:150] if text not in held_out]
    assert "fineweb: " in data.describe()


def test_openwebtext_from_json_lines_with_a_tokenizer_trained_on_the_start(jsonl, tmp_path):
    recipe = load_recipe("openwebtext")
    arguments = recipe.StreamArguments(str(tmp_path / "out"), "sentencepiece", 320, str(jsonl))
    arguments.validation_fraction = FRACTION
    recipe.main(arguments)
    train, held_out = (read_documents(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + held_out) == sorted(TEXTS)


@pytest.mark.slow
def test_output_to_preprocess_is_json_lines(jsonl):
    command = [sys.executable, "data/openwebtext/prepare.py", "output=-", f"path={jsonl}", "max_documents=120"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [{"text": text} for text in TEXTS[:120]]


def test_the_hubs_names_are_asked_for(monkeypatch):
    """What is asked of the library, of which the network is not there to answer."""
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: asked.append((given, named)) or [])
    fineweb, owt = (load_recipe(name).HUB for name in ("fineweb", "openwebtext"))
    open_rows(fineweb, None, "sample-10BT")
    open_rows(owt, None, owt.config)
    assert asked == [
        (("HuggingFaceFW/fineweb", "sample-10BT"), {"split": "train", "streaming": True}),
        (("Skylion007/openwebtext", None), {"split": "train", "streaming": True}),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"body": "b", "id": 1}], "row 1 has no column text; it has body, id"),
        ([{"text": "a"}, {"text": None}, {"text": 7}], "column text of row 2 is int, not text"),
    ],
)
def test_a_row_that_has_no_text_is_named(rows, message):
    with pytest.raises(ConfigError, match=f"^data.path=x: {message}"):
        list(texts(rows, "text", "data.path=x"))


def test_empty_rows_are_left_out():
    assert list(texts([{"text": ""}, {"text": "a"}, {"text": None}], "text", "x")) == ["a"]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs a missing package; pip install 'gptlite\[hub\]'$"):
        open_rows(load_recipe("fineweb").HUB, None, None)


DAMAGED = {"x.parquet": "PAR1 and no more", "x.jsonl": '{"text": "a"}\n{"text": \n'}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no .parquet or .jsonl files"),
        (DAMAGED, "holds both .parquet and .jsonl"),
        (["x.parquet"], r"data.path=.* cannot be (opened|read)"),
        (["x.jsonl"], r"data.path=.* cannot be (opened|read)"),
    ],
    ids=["nothing", "both", "parquet", "jsonl"],
)
def test_damaged_sources_are_named(tmp_path, names, message):
    recipe = load_recipe("fineweb")
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_text(DAMAGED[name])
    with pytest.raises(ConfigError, match=message) as error:
        recipe.main(recipe.StreamArguments(str(tmp_path / "out"), "byte", path=str(tmp_path / "in")))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("out/train*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"max_documents": 0}, "max_documents=0"), ({"validation_fraction": 0.0}, "validation_fraction=0.0")],
)
def test_wrong_arguments_of_a_recipe_are_refused(tmp_path, changes, message):
    recipe = load_recipe("fineweb")
    with pytest.raises(ConfigError, match=message):
        recipe.main(recipe.StreamArguments(str(tmp_path / "out"), **changes))


def test_a_split_without_documents_is_refused(jsonl, tmp_path):
    recipe = load_recipe("openwebtext")
    arguments = recipe.StreamArguments(str(tmp_path / "out"), "byte", path=str(jsonl), max_documents=1)
    with pytest.raises(ConfigError, match="a split has no documents: 1 for training, 0 held out; raise max_documents"):
        recipe.main(arguments)
    assert not list(tmp_path.glob("out/*.idx"))


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
    """JSON allows one, and SentencePiece raises on it."""
    tokenizer = train_sentencepiece(TEXTS, 320, lambda _: None)
    documents = [f"{text}\ud83d" for text in TEXTS]
    write_stream(documents, tmp_path, tokenizer, StreamArguments(str(tmp_path), validation_fraction=FRACTION))
    assert all(text.endswith(".\n?") for text in read_documents(tmp_path, "train"))


def test_progress_counts_the_documents_that_are_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(streaming, "Progress", partial(Progress, interval=0))
    arguments = StreamArguments(str(tmp_path), validation_fraction=0.5, max_documents=20)
    write_stream(TEXTS[:20], tmp_path, ByteTokenizer(), arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokenizing: ")]
    assert [int(line.split()[1]) for line in lines] == list(range(1, 21))
    assert lines[-1].endswith(" of at most 20, ETA 0s")
