"""How a command of gptlite is written where this process runs: every hint that is printed comes from here."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import gptlite

# Each command: its module, whose `main` reads the command line, and its line in the help.
COMMANDS = {
    "train": ("gptlite.commands.train", "train a model, or go on with a run: [GROUP=PRESET] [KEY=VALUE]"),
    "sweep": ("gptlite.commands.train", "train -m: one run for each of several values, and a report"),
    "plan": ("gptlite.commands.plan", "the fastest layouts of a model on a cluster, by arithmetic"),
    "tune": ("gptlite.commands.tune", "the fastest layout by measuring, as a preset"),
    "parity": ("gptlite.commands.parity", "whether a layout trains as one process does"),
    "preprocess": ("gptlite.commands.preprocess", "tokenize a corpus into a folder that training reads"),
    "train-tokenizer": ("gptlite.commands.train_tokenizer", "train a tokenizer on a corpus"),
    "data": ("gptlite.data_tool.command", "token files: inspect, show, verify, import"),
    "checkpoint": ("gptlite.checkpoint_tool.command", "ls, inspect, verify, diff, prune, export, import"),
    "kernels": ("gptlite.commands.kernels", "the fused kernels: build, info, test, bench"),
    "generate": ("gptlite.commands.generate", "continue a text with a trained model"),
    "eval": ("gptlite.commands.eval", "the loss of a trained model on held-out text"),
}
CANONICAL = re.compile(rf"\bgptlite ({'|'.join(sorted(COMMANDS, key=len, reverse=True))})\b(?!-)")
RECIPE = re.compile(r"\bpython data/(\w+)/prepare\.py")


def command(name: str) -> str:
    """The words that start a command: a script of the checkout, or `gptlite train` where a wheel is installed.

    In a checkout the script's path is from the working directory, or whole where that is outside.
    """
    words = arguments(name)
    if words[0] == "-m" and (found := shutil.which("gptlite")) and Path(found).parent == Path(sys.executable).parent:
        return f"gptlite {name}"
    return shlex.join([_python(), *words])


def arguments(name: str) -> list[str]:
    """What Python, or torchrun, is given to start a command."""
    assert name in COMMANDS, name
    script = "train.py" if name == "train" else f"tools/{name.replace('-', '_')}.py"
    return _script(script) or ["-m", "gptlite", name]


def recipe(corpus: str) -> str:
    """The words that start a corpus's recipe."""
    return shlex.join(
        [_python(), *(_script(f"data/{corpus}/prepare.py") or ["-m", f"gptlite.recipes.{corpus}.prepare"])]
    )


def localized(text: str) -> str:
    """A help text, its `gptlite COMMAND` and `python data/CORPUS/prepare.py` as they are written here."""
    text = RECIPE.sub(lambda match: recipe(match[1]), text)
    return CANONICAL.sub(lambda match: command(match[1]), text)


def _script(relative: str) -> list[str] | None:
    """A script of the checkout that this package is in; None where there is none."""
    root = Path(gptlite.__file__).resolve().parents[1]
    file = root / relative
    if not ((root / "pyproject.toml").is_file() and file.is_file()):
        return None
    here = Path.cwd()
    return [str(file.relative_to(here) if file.is_relative_to(here) else file)]


def _python() -> str:
    """`python` where that is this interpreter, else its path."""
    found = shutil.which("python")
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable
