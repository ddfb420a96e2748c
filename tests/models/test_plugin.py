"""A model of one's own from the command line: `plugins=[...]`."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from models.toy import RUN, SYNTHETIC
from run_files import read_metrics

from gptlite.config import CONF_DIR, from_yaml, load, to_yaml
from gptlite.errors import ConfigError
from gptlite.plugins import import_plugins, named_in

TRAIN = str(CONF_DIR.parent / "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parent / "toy.py", tmp_path / "my_model.py")
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, TRAIN, *words]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)


OWN = ("plugins=[my_model]", *SYNTHETIC, *RUN)


def test_the_modules_of_a_command_line() -> None:
    assert named_in(["plugins=[a, b.c]", "seed=1"]) == ["a", "b.c"]
    assert named_in(["+plugins=one"]) == ["one"]
    assert named_in(["plugins=[a]", "plugins=[]"]) == []
    assert named_in(["run.name=plugins=[a]"]) == []


def test_it_trains_and_goes_on_on_two_ranks(folder: Path) -> None:
    run = ("run.dir=run", "trainer.max_steps=3")
    done = command(folder, *OWN, *run)
    assert done.returncode == 0, done.stderr
    more = ("trainer.max_steps=6", "parallelism=zero3", "parallelism.data=2")
    done = command(folder, "run.dir=run", *more)  # the folder remembers the plugin
    assert done.returncode == 0, done.stderr + done.stdout
    assert "resuming from" in done.stdout
    assert [row["step"] for row in read_metrics(folder / "run") if "loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_it_is_swept(folder: Path) -> None:
    done = command(folder, "-m", *OWN, "model.channels=8,16", "trainer.max_steps=3", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = list(csv.DictReader((folder / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert len({row["val_loss"] for row in rows}) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plugins=[nowhere]",), "plugins=[nowhere]: no module nowhere in "),
        (("plugins=[broken]",), "plugins=[broken]: ZeroDivisionError while it was imported: division by zero"),
        (("plugins=[lacking]",), "plugins=[lacking]: No module named 'of_another'"),
        (("plugins=[taken]",), "a model gpt is registered already, by gptlite.models.gpt.config"),
        (("model=conv",), "model=conv does not exist"),
        ((*OWN, "model.chanels=3"), "model.chanels is not a key"),
        (("plugins=[my_model]", "model=conv", "run.name=x"), "would be the model's "),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, words: tuple[str, ...], said: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "lacking.py").write_text("import of_another\n")
    (folder / "taken.py").write_text(
        "from gptlite.models.registry import register_model\nfrom my_model import ConvSpec\n"
        "class Spec(ConvSpec):\n    name = 'gpt'\nregister_model(Spec())\n"
    )
    done = command(folder, *words)
    assert done.returncode == 2, done.stderr + done.stdout
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_saved_configuration_imports_what_it_needs() -> None:
    config = load(["plugins=[models.toy]", *SYNTHETIC, *RUN, "run.dir=unused"])
    assert from_yaml(to_yaml(config)) == config
    assert "plugins:\n- models.toy" in to_yaml(config)
    with pytest.raises(ConfigError, match="no module nowhere"):
        from_yaml(to_yaml(config).replace("models.toy", "nowhere"))
    with pytest.raises(ConfigError, match=r"no module models\.nothing"):
        import_plugins(["models.nothing"])
