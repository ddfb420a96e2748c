"""`gptlite new`, and packages that are found by their entry point as if they were installed."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import forked
import pytest
from run_files import read_metrics

from gptlite.commands import new
from gptlite.errors import ConfigError

ROOT = Path(__file__).parents[1]


def python(folder: Path, words: list[str], *paths: Path) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, with `paths` and this checkout as the Python path."""
    path = os.pathsep.join(map(str, [*paths, ROOT]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return forked.run(*words, folder=folder, environment=environment)


def gptlite(folder: Path, words: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    return python(folder, ["-m", "gptlite", *words.split()], *paths)


def printed(folder: Path, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The command of `gptlite new`, which changes to the project's folder, with further words."""
    change, _, command = line.partition(" && ")
    name, executable = change.removeprefix("cd "), shlex.split(command)[0]
    assert shutil.which(executable)
    return python(folder / name, [*shlex.split(command)[1:], *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the command was given, and the command that it has printed last."""
    folder = tmp_path_factory.mktemp("new")
    done = gptlite(folder, "new my_project")
    assert done.returncode == 0, done.stderr
    *written, train = done.stdout.splitlines()
    assert [line.removeprefix("written: my_project/") for line in written] == [
        "pyproject.toml",
        "my_project/__init__.py",
        "my_project/model.py",
        "my_project/data.py",
    ]
    return folder, train


@pytest.fixture(scope="module")
def site(made: tuple[Path, str]) -> Path:
    """The project's folder with the metadata of an installed package."""
    project = made[0] / "my_project"
    installed(project, "my-project", "my_project = my_project")
    return project


def installed(site: Path, name: str, entry_point: str) -> None:
    """Write what an installer writes beside a package."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[gptlite.plugins]\n{entry_point}\n")


@pytest.mark.slow
def test_the_printed_command_trains(made: tuple[Path, str]) -> None:
    folder, train = made
    more = ("run.dir=run", "trainer.max_steps=30", "trainer.log_interval=1", "schedule.warmup_steps=1")
    done = printed(folder, train, *more)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_metrics(folder / "my_project" / "run") if "loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_it_trains_on_two_ranks_with_zero(made: tuple[Path, str]) -> None:
    folder, train = made
    done = printed(folder, train, "trainer.max_steps=2", "parallelism=zero2", "parallelism.data=2")
    assert done.returncode == 0, done.stderr


def test_no_name_of_the_template_is_left(made: tuple[Path, str]) -> None:
    for path in (made[0] / "my_project").rglob("*.*"):
        if path.suffix in (".py", ".toml"):
            assert "template" not in path.read_text(), path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (".", r"\. exists"),
        ("my-project", r"cannot be named my-project; give letters, digits and _, such as my_project"),
        ("3d", "cannot be named 3d"),
        ("class", "cannot be named class"),
        ("null", "cannot be named null"),
        ("json", "json is installed or part of Python"),
        ("torch", "torch is installed or part of Python"),
        ("tools", "tools is installed or part of Python"),  # of this checkout, which its scripts have on their path
        ("gpt2", "model=gpt2 is a preset"),
        ("/dev/null/one", "/dev/null is a file"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(path: str, said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        new.run([path])
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_is_simply_there(site: Path, tmp_path: Path) -> None:
    done = gptlite(tmp_path, "train model=my_project data=my_project --cfg job", site)
    assert done.returncode == 0, done.stderr
    assert "name: my_project" in done.stdout
    assert "plugins: []" in done.stdout
    shown = gptlite(tmp_path, "train --help", site).stdout.partition("The configuration")[0]
    presets = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.startswith("  ")}
    assert (presets["model:"], presets["data:"]) == ("my_project", "my_project")
    done = gptlite(tmp_path, "train model=my_projct", site)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean my_project?" in done.stderr


@pytest.mark.slow
def test_ranks_and_a_resumed_run_find_it_too(site: Path, tmp_path: Path) -> None:
    words = "train model=my_project data=my_project run.dir=run trainer.max_steps=2"
    done = gptlite(tmp_path, f"{words} parallelism=ddp parallelism.data=2", site)
    assert done.returncode == 0, done.stderr
    done = gptlite(tmp_path, "train run.dir=run trainer.max_steps=4", site)
    assert done.returncode == 0, done.stderr
    done = gptlite(tmp_path, "train run.dir=run trainer.max_steps=6")  # where the package is not installed
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has model=my_project, which no plugin or installed package registers" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1 / 0", "importing it raised ZeroDivisionError: division by zero"),
        ("import of_another", "importing it raised ModuleNotFoundError: No module named 'of_another'"),
        (None, "importing it raised ModuleNotFoundError: No module named 'theirs'"),
    ],
)
def test_a_broken_package_is_named(content: str | None, said: str, tmp_path: Path) -> None:
    installed(tmp_path, "their-models", "theirs = theirs")
    if content:
        (tmp_path / "theirs.py").write_text(content)
    done = gptlite(tmp_path, "train --cfg job", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"error: their-models: its plugin theirs = theirs: {said}; repair or uninstall their-models" in done.stderr
