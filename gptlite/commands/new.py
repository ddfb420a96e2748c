"""Write a package with an example model and dataset, which can be trained as they are, to be replaced by your own.

gptlite new FOLDER

FOLDER must not exist. Its name becomes the name of the package and of its presets for model= and data=. The command
writes pyproject.toml, which declares the package as a plugin, and the package: __init__.py, model.py and data.py. The
last line printed is the command that trains the model. Exit codes: 0 written, 1 I/O error, 2 refused.
"""

import contextlib
import keyword
import os
import re
import shlex
import sys
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

import gptlite
from gptlite.commands.train import run_command
from gptlite.config.command_line import Subcommand, separate
from gptlite.config.keys import presets_of
from gptlite.config.plugins import as_override, import_plugins
from gptlite.errors import ConfigError
from gptlite.files import new_folder, refuse_used, unwritable
from gptlite.invocation import command

TEMPLATE = "template"  # name in the files of gptlite/template, to be replaced by the package's name
STEPS = "trainer.max_steps=300"
MODULES = ("__init__.py", "model.py", "data.py")
NAME = re.compile(r"[A-Za-z](\w*[A-Za-z0-9])?", re.ASCII)  # valid for Python packages, distributions and presets
VALUES = ("null", "true", "false", "inf", "nan")  # the command line does not parse these as text


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(arguments: list[str]) -> int:
    """Write the package, and print the command that trains; returns 0. Raises ConfigError for an unusable folder."""
    (path,), _ = separate("new", Subcommand("", ("FOLDER",)), arguments, [])
    folder = Path(os.path.abspath(Path(path).expanduser()))
    refuse(folder, path)
    name = folder.name
    written = ["pyproject.toml", *(f"{name}/{module}" for module in MODULES)]
    with new_folder(folder) as whole:
        (whole / name).mkdir()
        for target in (whole / each for each in written):
            text = files("gptlite").joinpath(TEMPLATE, target.name).read_text(encoding="utf-8")
            text = re.sub(rf"(gptlite\.)?\b{TEMPLATE}\b", name, text)
            target.write_text(text, encoding="utf-8")
    for each in written:
        print(f"written: {os.path.relpath(folder / each)}")
    with contextlib.chdir(folder):
        train = f"{command('train')} {shlex.join([as_override([name]), f'model={name}', f'data={name}', STEPS])}"
    print(f"cd {shlex.quote(path)} && {train}")
    return 0


def refuse(folder: Path, argument: str) -> None:
    """Raise ConfigError if `folder`, typed as `argument`, cannot be written or its name cannot be that of a package."""
    name = folder.name
    refuse_used("FOLDER", Path(argument).expanduser())
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in VALUES:
        fitting = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789")
        hint = f", such as {fitting}" if NAME.fullmatch(fitting) and fitting != name else ""
        raise ConfigError(f"{argument}: a package cannot be named {name}; give letters, digits and _{hint}")
    beside = str(Path(gptlite.__file__).resolve().parents[1])  # scripts of a checkout have this folder on sys.path
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, [*sys.path, beside]):
        raise ConfigError(f"{argument}: a module named {name} is installed or part of Python; give another name")
    import_plugins([])
    for group in ("model", "data"):
        if name in presets_of(group):
            raise ConfigError(f"{argument}: {group}={name} is a preset of gptlite; give another name")
    if reason := unwritable(folder, "folder"):
        raise ConfigError(f"{argument}: {reason}")
