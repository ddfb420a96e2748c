"""Command lines that start gptlite's commands in this environment, for printed hints."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import gptlite

# Module of each command, whose `main` reads the command line, and its line in the help.
COMMANDS = {
    "train": ("gptlite.commands.train", "train a model, or resume a run: [GROUP=PRESET] [KEY=VALUE]"),
    "sweep": ("gptlite.commands.train", "train -m: one run per combination of values, and a report"),
    "new": ("gptlite.commands.new", "write a package with a model and a dataset of your own: FOLDER"),
    "plan": ("gptlite.commands.plan", "estimate the fastest layouts of a model on a cluster"),
    "tune": ("gptlite.commands.tune", "find the fastest layout by measurement, as a preset"),
    "parity": ("gptlite.commands.parity", "check that a layout trains like a single process"),
    "preprocess": ("gptlite.commands.preprocess", "tokenize a corpus into a folder that training reads"),
    "train-tokenizer": ("gptlite.commands.train_tokenizer", "train a tokenizer on a corpus"),
    "import-config": ("gptlite.commands.import_config", "translate a DeepSpeed JSON: FILE [ranks=N]"),
    "data": ("gptlite.data_tool.command", "token files: inspect, show, verify, import"),
    "checkpoint": ("gptlite.checkpoint_tool.command", "ls, inspect, verify, diff, prune, export, import"),
    "kernels": ("gptlite.commands.kernels", "the fused kernels: build, info, test, bench"),
    "generate": ("gptlite.commands.generate", "continue a text with a trained model"),
    "eval": ("gptlite.commands.eval", "evaluate a trained model on held-out text, or on tasks of lm-eval"),
}
CANONICAL = re.compile(rf"\bgptlite ({'|'.join(sorted(COMMANDS, key=len, reverse=True))})\b(?!-)")
RECIPE = re.compile(r"\bpython data/(\w+)/prepare\.py")


def command(name: str) -> str:
    """Return the start of a command line: a script in a checkout, or e.g. `gptlite train` with an installed wheel.

    In a checkout, the script's path is relative to the working directory, or absolute if it is outside.
    """
    words = arguments(name)
    # Suggest `gptlite` only if it belongs to this interpreter, as another environment may have its own.
    if words[0] == "-m" and (found := shutil.which("gptlite")) and Path(found).parent == Path(sys.executable).parent:
        return f"gptlite {name}"
    return shlex.join([python(), *words])


def arguments(name: str) -> list[str]:
    """Return the arguments of Python, or torchrun, that start a command."""
    assert name in COMMANDS, name
    script = "train.py" if name == "train" else f"tools/{name.replace('-', '_')}.py"
    return _script(script) or ["-m", "gptlite", name]


def recipe(corpus: str) -> str:
    """Return the start of the command line of a corpus's recipe."""
    return shlex.join(
        [python(), *(_script(f"data/{corpus}/prepare.py") or ["-m", f"gptlite.recipes.{corpus}.prepare"])]
    )


def localized(text: str) -> str:
    """Rewrite `gptlite COMMAND` and `python data/CORPUS/prepare.py` in a help text as they must be typed here."""
    text = RECIPE.sub(lambda match: recipe(match[1]), text)
    return CANONICAL.sub(lambda match: command(match[1]), text)


def _script(relative: str) -> list[str] | None:
    """Return [path of the script] if this package is in a checkout that has it, else None."""
    root = Path(gptlite.__file__).resolve().parents[1]
    file = root / relative
    if not ((root / "pyproject.toml").is_file() and file.is_file()):
        return None
    here = Path.cwd()
    return [str(file.relative_to(here) if file.is_relative_to(here) else file)]


def python() -> str:
    """Return `python` if that starts this interpreter, else the path of the interpreter."""
    found = shutil.which("python")
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable
