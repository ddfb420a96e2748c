"""Folders of somebody else: no command imports the plugins that they record, unless it names them."""

import json
import os
import re
import subprocess
from pathlib import Path

import forked
import pytest
from models.toy import RUN, SYNTHETIC

from gptlite.config import load
from gptlite.config.plugins import may_run_code
from gptlite.config.resume import saved_overrides
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.errors import ConfigError
from gptlite.satellites.sweep.begin import sweep_overrides

TESTS = Path(__file__).parent
NAMED = "plugins=[planted]"
# Runs the commands of argv[1], a JSON list, in one process. Prints each one's exit code, and if it has imported it.
DRIVER = """
import json, sys
from pathlib import Path
from gptlite.__main__ import main
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["gptlite", *words]
    try:
        main()
    except SystemExit as over:
        ended.append([over.code, Path("imported").exists()])
print(json.dumps(ended))
"""
REFUSED = """
train run.dir=run
train run.dir=run trainer.max_steps=9 parallelism=zero1 parallelism.data=2
train run.dir=new checkpoint.resume=run checkpoint.load=weights
sweep hydra.sweep.dir=sweep
plan run.dir=run
generate checkpoint=run
eval checkpoint=run
checkpoint export run out
data show run step=1
""".split("\n")[1:-1]
WITHOUT = """
checkpoint ls .
checkpoint inspect run
checkpoint verify run
checkpoint diff run run
""".split("\n")[1:-1]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    return forked.run(*words, folder=folder, environment=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and a sweep, with a module that notes that it is imported."""
    folder = tmp_path_factory.mktemp("planted")
    text = (TESTS / "models" / "toy.py").read_text()
    (folder / "planted.py").write_text(f"{text}\nopen('imported', 'w').close()\n")
    done = run(folder, "-m", "gptlite", "train", NAMED, *SYNTHETIC, *RUN, "run.dir=run", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr + done.stdout
    (folder / "imported").unlink()
    sweep = {"overrides": [NAMED, *SYNTHETIC, *RUN, "seed=1,2"], "hydra": [], "swept": ["seed"], "cells": 2}
    (folder / "sweep").mkdir()
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"version": 1, "sweep": sweep, "cells": []}))
    return folder


def test_no_command_imports_what_a_folder_names(folder: Path) -> None:
    done = run(folder, "-c", DRIVER, json.dumps([line.split() for line in REFUSED + WITHOUT]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [[2, False]] * len(REFUSED) + [[0, False]] * len(WITHOUT)
    assert dict(zip(REFUSED + WITHOUT, found, strict=True)) == dict(zip(REFUSED + WITHOUT, expected, strict=True))
    errors = done.stderr.splitlines()
    assert len(errors) == len(REFUSED)
    assert all(f"uses {NAMED}; add {NAMED} to the command to import it" in line for line in errors), done.stderr


def test_a_notebook_is_refused_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("imported").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"run uses plugins=\[planted\]; add plugins=\[planted\]"):
        load(["run.dir=run"])
    assert not Path("imported").exists()


@pytest.mark.slow
def test_commands_that_name_it_work(folder: Path) -> None:
    words = [
        "train run.dir=run trainer.max_steps=4 parallelism=zero1 parallelism.data=2",
        "train run.dir=new checkpoint.resume=run checkpoint.load=weights model=conv optimizer.lr=1e-3",
        "train run.dir=run trainer.max_steps=6",
        "eval checkpoint=run",
    ]
    words[1] += " data.sequence_length=32 run.name=new data=synthetic data.vocab_size=61 trainer.max_steps=1"
    done = run(folder, "-c", DRIVER, json.dumps([[*line.split(), NAMED] for line in words]))
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, True]] * len(words), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib"]])
def test_a_sweep_goes_on_with_the_name(folder: Path, launcher: list[str]) -> None:
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = run(folder, "-m", "gptlite", "sweep", "hydra.sweep.dir=sweep", NAMED, "trainer.max_steps=2", *launcher)
    assert done.returncode == 2
    done = run(folder, "-m", "gptlite", "sweep", "hydra.sweep.dir=sweep", NAMED, *launcher)
    assert done.returncode == 0, done.stderr
    assert "2 cells: 2 ok" in done.stdout, done.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_import_it(folder: Path) -> None:
    words = ["run.dir=outer", *SYNTHETIC, *RUN, NAMED, "parallelism.data=2", "trainer.max_steps=2"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "gptlite", "train"]
    done = run(folder, *torchrun, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "stored",
    [
        "+hydra.callbacks.evil._target_=runpy.run_path",
        "+hydra/callbacks=evil",
        "hydra.searchpath=[/evil]",
        "--config-dir=/evil",
        " plugins=[evil]",
        "experiment=../../evil",
        "+experiment@hydra.callbacks=evil",
        "experiment=${oc.env:HOME}",
        "logger.project=${oc.env:HOME}",
        "logger.project='x-${ oc.decode : a}'",
        "logger.project=${a.${oc.env:HOME}}",
        "++run.name=${now:%Y}",
        "plugins=[evil]",
    ],
)
def test_stored_overrides_run_no_code(tmp_path: Path, stored: str) -> None:
    config = load([*SYNTHETIC, "run.name=theirs", "run.dir=unused"])
    config.run.overrides = ["data=synthetic", stored]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"may run code; remove it|uses plugins=\[evil\]|reads what is outside"):
        saved_overrides([f"run.dir={tmp_path}"])


def test_a_stored_value_reads_no_environment(tmp_path: Path) -> None:
    config = load([*SYNTHETIC, "run.name=theirs", "run.dir=unused"])
    text = to_yaml(config)
    assert from_yaml(text) == config
    for value in ("${oc.env:HOME}", "x-${oc.decode:1}", "${model.name}"):
        with pytest.raises(ConfigError, match=r"data.cache_dir=.* is an interpolation"):
            from_yaml(re.sub(r"(?m)^  cache_dir: .*$", f"  cache_dir: {value}", text), tmp_path)


def test_a_value_of_the_environment_is_given_again(tmp_path: Path) -> None:
    config = load([*SYNTHETIC, "run.name=mine", "run.dir=unused"])
    config.run.overrides = ["data=synthetic", "data.cache_dir=${oc.env:HOME}"]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"give data\.cache_dir=VALUE"):
        saved_overrides([f"run.dir={tmp_path}"])
    assert "data=synthetic" in saved_overrides([f"run.dir={tmp_path}", "data.cache_dir=x"])


@pytest.mark.parametrize(
    "stored", ["hydra.launcher._target_=evil", "hydra.launcher.setup=[evil]", "hydra.callbacks.a=1"]
)
def test_a_stored_launcher_runs_no_code(tmp_path: Path, stored: str) -> None:
    sweep = {"overrides": ["seed=1,2"], "hydra": [stored], "swept": ["seed"], "cells": 2}
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 1, "sweep": sweep, "cells": []}))
    with pytest.raises(ConfigError, match="may run code; give it again"):
        sweep_overrides([f"hydra.sweep.dir={tmp_path}"])


def test_what_a_run_stores_is_no_code() -> None:
    stored = ["model=gpt-lite", "data=tokens", "data.path=../x", "+sweep=parallelism", "~data.arguments", "seed=1,2"]
    stored += ["hydra.mode=RUN", "parallelism=tp2,single", "optimizer.lr=choice(1e-3,2e-3)", "data.path='a b=${c}'"]
    assert [each for each in stored if may_run_code(each)] == []
