"""Help on a group: each key with its value, type, range and comment; help on sweeps."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from gptlite.commands.train import help_of
from gptlite.config import help_keys
from gptlite.config.help_keys import group_help, sweep_help
from gptlite.config.schema import SCHEMAS, register
from gptlite.errors import ConfigError

register()


@pytest.mark.parametrize("group", [*SCHEMAS, "run"])
def test_every_group_has_help_that_fits_a_terminal(group: str) -> None:
    lines = group_help(group, []).splitlines()
    assert max(map(len, lines)) <= help_keys.WIDTH
    keys = [line for line in lines if line.startswith(f"{group}.")]
    assert all("=" in key for key in keys)
    assert keys or group == "logger"  # that of metrics.jsonl has none
    assert lines[0].startswith(f"choose {group}=") or group == "run"


def test_a_key_has_its_value_type_range_and_comment() -> None:
    assert group_help("trainer.max_steps", ["trainer.max_steps=7"]).splitlines()[1:] == [
        "trainer.max_steps=7",
        "    (whole number, at least 1) length of the run and of its learning-rate",
        "    schedule",
    ]
    text = " ".join(group_help("parallelism", []).split())
    assert "parallelism.zero=0 (whole number, at least 0 and at most 3) ZeRO stage: data ranks shard" in text
    assert "parallelism.offload=none (none | cpu | nvme) place of" in text
    assert "parallelism.timeout_seconds=300.0 (number, above 0 and at most 1,000,000) a collective" in text
    assert "model.num_layers=6 (whole number, at least 1 and at most 100,000)" in " ".join(
        group_help("model", ["model.num_layers=6"]).split()
    )
    assert "trainer.spike.window=128 (whole number, at least 8) number of losses" in " ".join(
        group_help("trainer.spike", []).split()
    )


def test_help_is_on_the_chosen_preset() -> None:
    assert "Lion: " in (text := group_help("optimizer", ["optimizer=lion"]))
    assert "optimizer.beta1=0.95\n    (number, in [0, 1), e.g. 0.9)" in text
    assert "optimizer.beta1" not in group_help("optimizer", ["optimizer=sgd"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trainr", "--help trainr: trainr is not a group; did you mean trainer?"),
        ("x", "--help x: x is not a group; the groups are run, model, parallelism"),
        ("trainer.max_stepz", "--help trainer.max_stepz: the chosen preset has no such key; did you mean max_steps?"),
    ],
)
def test_another_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        group_help(name, [])
    assert str(error.value).startswith(said)


def test_the_flags_choose_the_help() -> None:
    assert "--help GROUP" in help_of(["--help"], [])
    assert help_of(["--help", "trainer"], []) == group_help("trainer", [])
    assert help_of(["-m", "--help"], []) == sweep_help()
    assert max(map(len, help_keys.SWEEP_HELP.splitlines())) <= help_keys.WIDTH
    assert "{" not in sweep_help()


def test_a_class_without_source_has_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Notebook:
        width: int = 1  # of a layer

    assert help_keys._comments(Notebook) == {"width": "of a layer"}
    help_keys._comments.cache_clear()

    def no_source(_: object) -> str:
        raise OSError

    monkeypatch.setattr(help_keys, "inspect", SimpleNamespace(getsource=no_source))
    assert help_keys._comments(Notebook) == {}


def test_a_value_with_a_line_end_takes_one_line() -> None:
    assert group_help("trainer.sample_prompt", []).splitlines()[1] == r"trainer.sample_prompt=\n"
