"""A model and an optimizer of one's own from the command line: `plugins=[...]`, in files that nothing else names."""

import csv
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from models.toy import RUN, SYNTHETIC, ConvSpec
from optimizer.signum import SignumConfig
from plan.truth import workload
from plan.truth_layouts import Layout
from run_files import read_metrics

from gptlite.config import load
from gptlite.config.plugins import import_plugins, named_in
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import CONF_DIR, model_name
from gptlite.errors import ConfigError
from gptlite.models.registry import register_model
from gptlite.optimizer.config import OPTIMIZERS, SGDConfig
from gptlite.optimizer.registry import register_optimizer
from gptlite.parallelism.config import Offload
from gptlite.satellites.optimizers.configs import LionConfig
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.parameters import num_parameters

TESTS = Path(__file__).parent
OWN = ("plugins=[my_model,signum]", "optimizer=signum", *SYNTHETIC, *RUN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TESTS / "models" / "toy.py", tmp_path / "my_model.py")
    shutil.copy(TESTS / "optimizer" / "signum.py", tmp_path)
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forked.run(str(CONF_DIR.parent / "train.py"), *words, folder=folder, environment=environment)


def test_the_modules_of_a_command_line() -> None:
    assert named_in(["plugins=[a, b.c]", "seed=1"]) == ["a", "b.c"]
    assert named_in(["+plugins=one"]) == ["one"]
    assert named_in(["plugins=[a]", "plugins=[]"]) == []
    assert named_in(["run.name=plugins=[a]"]) == []


def test_a_run_has_the_name_of_its_model() -> None:
    given = ["data=synthetic", "data.sequence_length=16", "optimizer.lr=1e-3"]
    names = ("conv", "gpt2", "mine")  # a plugin, whose schema has no key `name`; a preset; a name that is given
    for name, words in zip(names, (["model=conv"], ["model=gpt2"], ["model.name=mine"]), strict=True):
        config = load([*given, *words])
        assert re.fullmatch(rf"{name}-\d{{8}}-\d{{6}}-\d{{6}}", config.run.name)
        assert model_name(config.model) == name


@pytest.mark.slow
def test_they_train_and_go_on_on_two_ranks(folder: Path) -> None:
    done = command(folder, *OWN, "run.dir=run", "trainer.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert "run.dir=run 'plugins=[my_model,signum]' trainer.max_steps=6" in done.stdout  # the command that resumes
    again = ("run.dir=run", "plugins=[my_model,signum]", "trainer.max_steps=6")
    done = command(folder, *again, "parallelism=zero3", "parallelism.data=2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "resuming from" in done.stdout
    rows = read_metrics(folder / "run")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    before, after = (row["val_loss"] for row in rows if "val_loss" in row)  # of the same samples
    assert after < before


@pytest.mark.slow
def test_a_plugin_is_swept_over_layouts(folder: Path) -> None:
    """Two layouts, each planned and trained to the same loss."""
    done = command(folder, "-m", *OWN, "parallelism.pipeline=1,2", "trainer.max_steps=3", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = list(csv.DictReader((folder / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    one, two = (float(row["val_loss"]) for row in rows)
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plugins=[nowhere]", "plugins=[nowhere]: no module named nowhere in "),
        ("plugins=[broken]", "plugins=[broken]: importing it raised ZeroDivisionError: division by zero"),
        ("plugins=[lacking]", "plugins=[lacking]: No module named 'of_another'"),
        ("plugins=[ending]", "plugins=[ending]: importing it raised SystemExit: 0"),
        ("plugins=[wordless]", "plugins=[wordless]: importing it raised Wordless: (its message cannot be printed"),
        ("model=conv", "; if a plugin registers it, add plugins=[MODULE]"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, words: str, said: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "lacking.py").write_text("import of_another\n")
    (folder / "ending.py").write_text("raise SystemExit(0)\n")
    wordless = "class Wordless(Exception):\n    def __str__(self):\n        return 1 / 0\n\n\nraise Wordless\n"
    (folder / "wordless.py").write_text(wordless)
    done = command(folder, words)
    assert done.returncode == 2, done.stderr + done.stdout
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_model_that_exits_has_failed(folder: Path) -> None:
    """Even if it exits as if all were well."""
    model = (folder / "my_model.py").read_text()
    exits = model.replace(
        "    def forward(", "    def forward(self, *_):\n        raise SystemExit(0)\n\n    def other("
    )
    assert exits != model
    (folder / "my_model.py").write_text(exits)
    done = command(folder, *OWN, "run.dir=run", "trainer.max_steps=3")
    assert done.returncode == 1, done.stdout
    assert "RuntimeError: the run's code called sys.exit(0)" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plugins=[models.toy] model=conv run.name=x", "choose another data= if the model reads samples, or give"),
        (
            "plugins=[optimizer.signum] optimizer=signum optimizer.momentum=1.5",
            "optimizer.momentum=1.5 must be in",
        ),
    ],
)
def test_their_values_are_checked(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(words.split())


def test_a_name_is_taken_once() -> None:
    class Spec(ConvSpec):
        name = "gpt"

    with pytest.raises(ConfigError, match=r"the model gpt is already registered by gptlite\.models\.gpt\.config"):
        register_model(Spec())
    register_optimizer("signum", SignumConfig)
    with pytest.raises(ConfigError, match=r"optimizer named adamw is already registered by gptlite\.optimizer\.config"):
        register_optimizer("adamw", SignumConfig)
    assert OPTIMIZERS["signum"] is SignumConfig


def test_a_saved_configuration_imports_what_it_needs() -> None:
    config = load(["plugins=[models.toy]", *SYNTHETIC, *RUN, "run.dir=unused"])
    assert from_yaml(to_yaml(config)) == config
    assert "plugins:\n- models.toy" in to_yaml(config)
    foreign = to_yaml(config).replace("models.toy", "nowhere")
    with pytest.raises(ConfigError, match=r"run uses plugins=\[nowhere\]; add plugins=\[nowhere\] to the"):
        from_yaml(foreign, "run")
    with pytest.raises(ConfigError, match="no module named nowhere"):
        from_yaml(foreign, imports=True)
    with pytest.raises(ConfigError, match=r"no module named models\.nothing"):
        import_plugins(["models.nothing"])


def test_the_planner_counts_an_optimizers_state() -> None:
    """A moment, as Lion's and SGD's, in memory and in files."""
    work = workload(Layout(1, "").config(), 1)
    assert estimate(replace(work, optimizer=SignumConfig()), 0).optimizer == 4 * num_parameters(work.model)
    for each in (work, replace(work, parallelism=replace(work.parallelism, offload=Offload.nvme))):
        taken = {
            estimate(replace(each, optimizer=kind()), 0).optimizer for kind in (SignumConfig, LionConfig, SGDConfig)
        }
        assert len(taken) == 1
        assert min(taken) > 0
