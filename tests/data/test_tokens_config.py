"""Prepared folders as a run's data: data=NAME, a blend as the shell gives it, and what is refused in one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from token_folders import documents, write_folder

from gptlite.commands.eval_rank import held_out
from gptlite.config import load
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.data.build import prepare
from gptlite.data.config import TokensConfig
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.tokenizers.base import CharTokenizer

MIX = "data.blend={data/web: 0.7, data/code: 0.3}"
LETTERS = set("".join(documents(0, 99)))


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./data/web and ./data/code."""
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        write_folder(Path("data") / name)


def tokens(*overrides: str) -> TokensConfig:
    config = load(["data=tokens", *overrides]).data
    assert isinstance(config, TokensConfig)
    return config


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_a_preset_by_its_name():
    by_name, by_path = load(["data=web"]).data, tokens("data.path=data/web")
    assert by_name == by_path
    data = prepare(by_name, seed=1)
    assert data.describe().startswith("data/web: ")
    assert [(each.name, each.weight) for each in data.sets] == [("data/web", 1.0)]
    assert data.tokenizer.decode(data.sets[0].train[:40].tolist()) == documents(sum(b"web"), 60)[0][:40]


def test_a_folders_name_may_have_any_letters():
    write_folder(Path("data/données"))
    config = replace(load(["data='données'"]), seed=1)
    assert held_out("données", config, prepare(config.data, seed=1).tokenizer).sets[0].name == "data/données"


def test_a_text_without_a_token_cannot_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("a")
    config = load(["data=web"])
    tokenizer = prepare(config.data, seed=1).tokenizer
    monkeypatch.setattr(
        "gptlite.satellites.corpus.cuts.encoded", lambda *_: []
    )  # of a tokenizer that does not know any character
    with pytest.raises(ConfigError, match="has one token, before which there is none to predict it; give more text"):
        held_out(str(tmp_path / "a.txt"), config, tokenizer)


def test_a_blend_is_read_as_the_shell_gives_it():
    for config in (tokens(MIX), load(["data=web", MIX]).data):
        data = prepare(config, seed=1)
        assert {each.name: each.weight for each in data.sets} == {"data/web": 0.7, "data/code": 0.3}
        assert data.describe().startswith("blend: ")
        assert "data/web 0.7, data/code 0.3" in data.describe()


def test_a_blend_survives_its_own_config_file():
    config = load(["data=tokens", MIX, "run.name=x"])
    assert from_yaml(to_yaml(config)).data == config.data


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        ("0", "0"),
        ("0.0", "0.0"),
        ("-1", "-1"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1e400", "inf"),
        (f"1{400 * '0'}", "1000"),
        ("much", "'much'"),
        ("'0.7'", "'0.7'"),
        ("true", "True"),
        ("null", "None"),
        ("[1]", "[1]"),
    ],
    ids=lambda text: text[:8],
)
def test_a_weight_that_is_none_is_refused(weight: str, named: str):
    line = refusal(lambda: tokens(f"data.blend={{data/web: {weight}, data/code: 0.3}}"))
    assert line.startswith(f"data.blend: data/web has the weight {named}")
    assert line.endswith("; give a number above 0, or remove it")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "data.path is not set; give a prepared folder (PREPROCESS), or data.blend={...}"),
        (["data.blend={}"], "data.blend={} has no weights; give e.g. {data/a: 0.7, data/b: 0.3}"),
        (["data.blend={}", "data.path=data/web"], "data.blend={} has no weights; give e.g. {data/a: 0.7, data/b: 0.3}"),
        (["data.blend=[data/web]"], "data.blend=['data/web'] has no weights; give e.g. {data/a: 0.7, data/b: 0.3}"),
        (
            ["data.path=data/wbe"],
            "data.path: data/wbe does not exist; give a prepared folder (PREPROCESS); did you mean data/web?",
        ),
        (
            ["data.blend={data/web: 1, data/coed: 1}"],
            "data.blend: data/coed does not exist; give a prepared folder (PREPROCESS); did you mean data/code?",
        ),
        (["data.path=data"], "data.path: data holds no train.idx; give a prepared folder (PREPROCESS)"),
        (
            [f"data.blend={{data/web: 1{308 * '0'}, data/code: 1{308 * '0'}}}"],
            "data.blend: the weights are too large to be added; divide them all by the same number",
        ),
    ],
    ids=["nothing", "empty", "empty_beside_path", "list", "path", "folder", "not_prepared", "sum"],
)
def test_what_is_no_data_is_refused(overrides: list[str], line: str):
    assert refusal(lambda: tokens(*overrides)) == line.replace("PREPROCESS", command("preprocess"))


def test_a_name_with_a_slip_is_guessed():
    line = "data=cdoe is neither a preset nor a prepared folder ./data/cdoe; did you mean code?"
    assert refusal(lambda: load(["data=cdoe"])).startswith(line)


def other_tokenizer() -> str:
    write_folder(Path("data/code"), CharTokenizer(LETTERS))
    return (
        f"data.blend: data/code has another tokenizer (char vocabulary of {CharTokenizer(LETTERS).vocab_size}) than "
        "data/web (byte vocabulary of 257); prepare both with the same tokenizer"
    )


def same_tokens() -> str:
    texts = documents(sum(b"web"), 60)
    write_folder(Path("data/code"), train=texts, val=texts[:4])
    return "data.blend: data/code has the same tokens as data/web; keep one, and add the weights"


def short() -> str:
    write_folder(Path("data/code"), train=["a" * 255], val=["no cat"])  # 256 tokens with the end of document
    return (
        "data.sequence_length=256 needs more than 256 training tokens, but data/code has 256; lower it, or give more "
        "text"
    )


@pytest.mark.parametrize("change", [other_tokenizer, same_tokens, short], ids=lambda each: each.__name__)
def test_folders_that_do_not_go_together_are_refused(change: Callable[[], str]):
    line = change()
    assert refusal(lambda: prepare(tokens(MIX, "data.sequence_length=256"), seed=1)) == line


def test_a_folder_beside_a_blend_must_have_its_tokenizer():
    """A checkpoint's vocabulary, or what data.path says, is not changed by the blend that is read instead."""
    write_folder(Path("data/mine"), CharTokenizer(LETTERS))
    line = refusal(lambda: prepare(load(["data=mine", MIX]).data, seed=1))
    assert line.startswith("data.blend: data/web has another tokenizer (byte vocabulary of 257) than data/mine (char")
