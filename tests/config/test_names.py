"""Names with any characters, as values of overrides."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gptlite import load
from gptlite.config.command_line import LITERAL, parse_arguments
from gptlite.config.overrides import command_value, hydra_value, unquoted, values_of
from gptlite.config.plugins import as_override, named_in
from gptlite.config.resume import not_resumed, saved_file
from gptlite.config.schema import CONF_DIR, register
from gptlite.config.warm_start import model_overrides
from gptlite.errors import ConfigError
from gptlite.satellites.sweep.begin import sweep_overrides

# Characters that Hydra, OmegaConf or a shell would interpret, and any others.
SPECIAL = st.text("\\'\"${}[]()~=,:;#@*?!%+-./_ \t\n0123456789eEinfatruль试é", max_size=12)
TEXTS = SPECIAL | st.text(st.characters(codec="utf-8"), max_size=30)
NAMES = (
    *("null", "1e3", "1_0", "true", "", "it's", "a\\", "a\\\\b", "\\'", "x=y"),
    *("${oc.env:HOME}", "\\\\${x}", "~/données", "试验1"),
)


def quick(test):
    """Decorate a test with its texts: drawn ones, the same in each run, and NAMES."""
    test = settings(max_examples=100, deadline=None, database=None, derandomize=True)(given(TEXTS)(test))
    for each in NAMES:
        test = example(each)(test)
    return test


@quick
def test_a_value_in_an_override_is_read_as_it_was(text: str) -> None:
    value = OverridesParser.create().parse_override(f"run.name={hydra_value(text)}").value()
    assert OmegaConf.create({"name": value}).name == text
    assert unquoted(hydra_value(text)) == text


@quick
def test_quotes_of_either_kind_are_removed_as_hydra_removes_them(text: str) -> None:
    for quote in "'\"":
        typed = quote + text + quote
        try:
            value = OverridesParser.create().parse_override(f"a={typed}").value()
        except Exception:  # the text has such a quote itself
            assert unquoted(typed) == typed
        else:
            assert not isinstance(value, str) or "${" in value or unquoted(typed) == value


@pytest.mark.parametrize("text", NAMES)
def test_a_command_reads_a_value_as_train_does(text: str) -> None:
    @dataclass
    class Options:
        path: str = ""
        prompt: str = field(default="", metadata=LITERAL)

    value = hydra_value(text)
    read = parse_arguments(Options, [f"path={value}", f"prompt={value}"])
    assert (read.path, read.prompt) == (text, value)
    assert parse_arguments(Options, [f"path={command_value(text)}"]).path == text
    assert parse_arguments(Options, [f"path={command_value(value)}"]).path == value


@pytest.mark.parametrize("text", [each for each in NAMES if each and "${" not in each])
def test_every_reader_of_a_folder_unquotes_alike(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    register()
    value, folder = hydra_value(text), Path(text).expanduser()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        assert compose("config", overrides=["data=synthetic", f"run.dir={value}"]).run.dir == text
    assert saved_file([f"run.dir={value}"]) == folder / "config.yaml"
    swept = sweep_overrides([f"hydra.sweep.dir={value}", "seed=1,2"])
    assert swept[-1] == f"hydra.sweep.dir={hydra_value(str(folder))}"
    with pytest.raises(ConfigError) as refusal:
        load([f"deepspeed={value}"])
    assert f"deepspeed={text}" in str(refusal.value)
    assert named_in([as_override([text, "b"])]) == ([text, "b"] if "," not in text else [])
    assert values_of([f"checkpoint.resume={value}"]) == {"checkpoint.resume": text}
    assert model_overrides([f"checkpoint.resume={value}", "checkpoint.load='weights'"]) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.dir=runs/first"], "; did you mean run.dir=runs/firs?"),
        (["run.dir='runs/first'", "trainer.max_steps=9", "plugins=[a]"], "; did you mean run.dir=runs/firs?"),
        (["run.dir=runs/else"], ""),
        (["run.dir=runs/firs"], None),
        (["run.dir=runs/first", "model=gpt2"], None),
        (["run.dir=runs/first", "checkpoint.resume=runs/firs"], None),
        (["trainer.max_steps=9"], None),
    ],
)
def test_a_folder_without_a_run_is_told_if_the_command_seems_to_resume(
    words: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "firs").mkdir(parents=True)
    (tmp_path / "runs" / "firs" / "config.yaml").touch()
    folder = words[0].partition("=")[2].strip("'")
    line = f"note: run.dir={folder} holds no run, so nothing is resumed, and a new run starts there{told}"
    assert not_resumed(words) == ("" if told is None else line)


def test_a_name_like_an_interpolation_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^run\.name=\$\{x\} has \$\{, which .*; leave it out$"):
        load(["data=synthetic", f"run.name={hydra_value('${x}')}"])


def test_a_name_that_is_not_utf8_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir=outputs/\\udce9 is not UTF-8, .*; rename the file or folder$"):
        load(["data=synthetic", "run.dir='outputs/\udce9'"])
