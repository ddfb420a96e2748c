"""Words and flags of other tools, and numbers as they write them."""

import subprocess
import sys

import pytest

from gptlite.commands.train import sort_arguments
from gptlite.config import load, other_tools
from gptlite.config.command_line import parse_arguments
from gptlite.config.compose import with_whole_numbers
from gptlite.data.config import SyntheticConfig
from gptlite.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--max_steps=5", "give trainer.max_steps=5"),
        ("--data.path x", "give data.path=x"),
        ("--data.pth x", "data.pth is not a key; did you mean data.path?"),
        ("--lr 3e-4", "give optimizer.lr=3e-4"),
        ("--learning-rate=3e-4", "give optimizer.lr=3e-4"),
        ("-lr", "give optimizer.lr=VALUE"),
        ("--model gpt2", "give model=gpt2"),
        ("--tp -m", "give parallelism.tensor=VALUE"),
    ],
)
def test_a_flag_of_another_tool_gets_the_key_here(words: str, given: str) -> None:
    with pytest.raises(ConfigError) as error:
        sort_arguments(words.split())
    assert str(error.value) == f"{words.split()[0]}: settings are KEY=VALUE, without dashes; {given}"


@pytest.mark.parametrize(
    ("flag", "way"),
    [
        ("--local_rank=0", "a launcher other than torchrun added it; use torchrun, or no launcher, since parallelism."),
        ("--local-rank=0", "a launcher other than torchrun added it"),
        ("--config-name", "there is one root configuration; choose presets"),
        ("--bf16", "choose precision=bf16"),
        ("-cp", "give the folder of your own presets as --config-dir"),
    ],
)
def test_a_flag_without_a_key_gets_another_way(flag: str, way: str) -> None:
    with pytest.raises(ConfigError) as error:
        sort_arguments([flag, "x"])
    assert str(error.value).startswith(f"{flag}: {way}")


def test_words_of_other_tools_lead_to_keys_that_exist() -> None:
    # In a process of its own, without the models of other tests.
    code = "from gptlite.config import keys, schema; schema.register(); print(*keys.known_keys())"
    keys = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(other_tools.KEYS.values()) <= set(keys)
    ours = {key.split(".")[-1] for key in keys}
    assert not ours & other_tools.KEYS.keys()  # a key here is not a word of another tool
    words = "learning_rate n_embd hidden_size block_size batch_size gpus epochs output_dir tp pp dp"
    assert set(words.split()) <= other_tools.KEYS.keys()


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    from dataclasses import dataclass

    @dataclass
    class Arguments:
        steps: int = 1
        name: str = ""

    config = load(["data=synthetic", "trainer.max_steps=1e3", "data.num_tokens=2.5e6", "run.name='1e3'"])
    assert isinstance(config.data, SyntheticConfig)
    assert (config.trainer.max_steps, config.data.num_tokens, config.run.name) == (1000, 2_500_000, "1e3")
    assert with_whole_numbers(["trainer.max_steps=1e3,2E+3,5", "optimizer.lr=1e3", "run.name=1e3"]) == [
        *("trainer.max_steps=1000,2000,5", "optimizer.lr=1e3", "run.name=1e3")
    ]
    assert parse_arguments(Arguments, ["steps=1e3", "name=1e3"]) == Arguments(1000, "1e3")
    for each in ("trainer.max_steps=1e-3", "trainer.max_steps=1.5e0"):
        with pytest.raises(ConfigError, match=r"trainer.max_steps: \S+ is not a whole number"):
            load([each])
    with pytest.raises(ConfigError, match=r"steps=1e-3: 0\.001 is not a whole number"):
        parse_arguments(Arguments, ["steps=1e-3"])
    unchanged = ["trainer.max_steps=1e999", "~trainer.max_steps"]
    assert with_whole_numbers(unchanged) == unchanged
