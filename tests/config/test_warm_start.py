"""checkpoint.load=weights takes the model from the checkpoint; what cannot work is refused in a way that helps."""

import subprocess
import sys
from pathlib import Path

import pytest
from token_folders import write_folder
from yaml import safe_load

from gptlite.checkpoint.compare import compare_configs
from gptlite.commands.train import main
from gptlite.config import load
from gptlite.config.saved import to_dict, to_yaml
from gptlite.config.schema import CONF_DIR
from gptlite.config.warm_start import model_overrides
from gptlite.tokenizers.base import CharTokenizer

TRAIN = CONF_DIR.parent / "train.py"
MODEL = (
    "model=gpt2",
    "model.num_layers=2",
    "model.mlp=relu",
    "model.vocab_size=257",
    "model.sequence_length=64",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As far as a composition looks into one."""
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load([*MODEL, "data=synthetic"])))
    return tmp_path / "run"


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(TRAIN), *arguments], capture_output=True, text=True, timeout=120)


def test_the_model_is_the_checkpoints(checkpoint):
    given = [f"checkpoint.resume={checkpoint}", "checkpoint.load=weights", "model.dropout=0.1"]
    config = load([*model_overrides(given), *given])
    there = load([*MODEL, "data=synthetic"]).model
    assert config.model.dropout == 0.1
    config.model.dropout = there.dropout
    assert config.model == there
    assert config.data.sequence_length == 64  # what follows the model follows it


def test_what_is_given_stays_and_nothing_is_taken_unasked(checkpoint):
    given = [f"checkpoint.resume={checkpoint}", "checkpoint.load=weights"]
    assert model_overrides([*given, "model=gpt-lite"]) == []
    assert model_overrides(given[:1]) == []
    assert model_overrides(["checkpoint.resume=never", "checkpoint.load=weights"]) == []
    assert model_overrides([f"{given[0]}/nowhere", given[1]]) == []  # the run itself refuses it


def test_the_command_composes_it_and_remembers_it(checkpoint):
    done = call(f"checkpoint.resume={checkpoint}", "checkpoint.load=weights", "--cfg", "job")
    model = safe_load(done.stdout)["model"]
    assert (model["num_layers"], model["d_model"], model["vocab_size"]) == (2, 768, 257)


@pytest.mark.parametrize("more", [(), ("parallelism=ddp",)])
def test_data_with_more_ids_than_the_weights_is_refused_before_a_rank_starts(
    checkpoint, tmp_path, more, monkeypatch, capsys
):
    folder = write_folder(tmp_path / "big", CharTokenizer(map(chr, range(200, 700))))
    data = ("data=tokens", f"data.path={folder}", f"run.dir={tmp_path / 'new'}")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # which the command sets
    given = (f"checkpoint.resume={checkpoint}", "checkpoint.load=weights", *data, *more)
    monkeypatch.setattr(sys, "argv", [str(TRAIN), *given])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has a vocabulary size of 257, less than the 502" in line
    assert "leave out checkpoint.resume and checkpoint.load" in line
    assert "model.vocab_size" not in line  # no value of it would do
    assert not (tmp_path / "new").exists()


def test_another_model_is_refused_by_what_helps():
    old, new = (to_dict(load([f"model={name}", "data=synthetic"])) for name in ("gpt2", "gpt-lite"))
    assert "resume=never" in compare_configs(old, new).refusal()
    refusal = compare_configs(old, new, "weights").refusal("weights")
    assert "leave out model" in refusal
    assert "resume=never" not in refusal
