"""Table of gptlite's commands, and the command lines that start them in this environment, for printed hints."""

import io
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import gptlite
from gptlite.errors import TRACEBACK

# For each command: the module whose `main` reads the command line, and the summary in the help.
COMMANDS = {
    "train": ("gptlite.commands.train", "train a model, or resume a run: [GROUP=PRESET] [KEY=VALUE]"),
    "sweep": ("gptlite.commands.train", "train --multirun: one run per combination of values, and a report"),
    "new": ("gptlite.commands.new", "write a package with a model and a dataset of your own: FOLDER"),
    "plan": ("gptlite.commands.plan", "estimate the fastest layouts of a model on a cluster"),
    "tune": ("gptlite.commands.tune", "measure the best planned layouts, and write the fastest as a preset"),
    "parity": ("gptlite.commands.parity", "check that a layout trains like a single process"),
    "certify": ("gptlite.commands.certify", "check a layout on this machine's CPU, and write its certificate"),
    "preprocess": ("gptlite.commands.preprocess", "tokenize a corpus into a folder that training reads"),
    "train-tokenizer": ("gptlite.commands.train_tokenizer", "train a tokenizer on a corpus"),
    "import-config": ("gptlite.commands.import_config", "translate a DeepSpeed JSON file to overrides: FILE [ranks=N]"),
    "data": ("gptlite.satellites.data_tool.command", "token files: inspect, show, verify, import"),
    "checkpoint": (
        "gptlite.satellites.checkpoint_tool.command",
        "ls, inspect, verify, diff, prune, export, import, upcycle",
    ),
    "kernels": ("gptlite.commands.kernels", "the fused kernels: build, info, test, bench"),
    "generate": ("gptlite.commands.generate", "continue a text with a trained model"),
    "eval": ("gptlite.commands.eval", "evaluate a trained model on held-out text, or on tasks of lm-eval"),
}
CANONICAL = re.compile(rf"\bgptlite ({'|'.join(sorted(COMMANDS, key=len, reverse=True))})\b(?!-)")
RECIPE = re.compile(r"\bpython data/(\w+)/prepare\.py")


def prepare_process() -> None:
    """Prepare this process, at the start of a command, for closed standard streams and for a locale that is not UTF-8.

    TRACEBACK is removed from the arguments: whoever prints an error looks for it in `sys.orig_argv`. A file opened in
    place of a closed stream would receive what is printed. In an ASCII locale, Python is started again in UTF-8 mode,
    since it cannot decode other names of files. A character that a stream lacks is printed as `\\u6f22`.
    """
    if TRACEBACK in sys.argv:
        sys.argv.remove(TRACEBACK)
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # becomes `number`, the lowest one that is free
        if getattr(sys, name := ("stdin", "stdout", "stderr")[number]) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # the descriptor may now lead elsewhere, where the position is unknown
                stream.reconfigure(errors="backslashreplace")


def command(name: str) -> str:
    """Return the start of a command line: `gptlite NAME`, or `python -m gptlite NAME` if that command is not installed.

    In a checkout, train is the script, with a path relative to the working directory, or absolute outside the checkout.
    """
    argv = arguments(name)
    # Suggest `gptlite` only if it belongs to this interpreter, as another environment may have its own `gptlite`.
    if argv[0] == "-m" and (found := shutil.which("gptlite")) and Path(found).parent == Path(sys.executable).parent:
        return f"gptlite {name}"
    return shlex.join([python(), *argv])


def launched_command() -> str:
    """Return the start of a train command line, with torchrun or srun as they started this rank."""
    words = arguments("train")
    if before := _torchrun():
        return shlex.join([*before, *words])
    tasks, nodes = (os.environ.get(f"SLURM_STEP_NUM_{each}", "1") for each in ("TASKS", "NODES"))
    if tasks != "1":
        return f"srun --nodes={nodes} --ntasks={tasks} {command('train')}"
    return command("train")


def _torchrun() -> list[str]:
    """Return the words of the launcher before this rank's own, [] unless it is a launcher like torchrun.

    Such a launcher ends its command line with that of its ranks, unlike train.py, which starts a module of gptlite. A
    rank of an elastic run is forked, so it has its parent's command line, of which the launcher is the last word.
    """
    own = list(sys.orig_argv[1:])
    while own and own[0].startswith("-") and own[0] != "-m":  # options of Python, such as -u
        del own[0]
    theirs = _words_of(os.getppid())
    if theirs and theirs == _words_of(os.getpid()):
        theirs = _words_of(theirs[-1])
    if not own or not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or theirs[-len(own) :] != own:
        return []
    before = theirs[: -len(own)]
    if len(before) > 1 and (found := shutil.which(name := Path(before[1]).name)) and Path(found).samefile(before[1]):
        return [name, *before[2:]]  # a script, e.g. torchrun, that Python runs
    return [python(), *before[1:]] if before[:1] == [sys.executable] else before


def _words_of(process: int | str) -> list[str]:
    """Return the command line of a process; [] if there is none."""
    try:
        return [os.fsdecode(each) for each in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def arguments(name: str) -> list[str]:
    """Return the arguments with which Python or torchrun starts a command."""
    assert name in COMMANDS, name
    script = _script("train.py") if name == "train" else None
    return script or ["-m", "gptlite", name]


def recipe(corpus: str) -> str:
    """Return the start of a command line that runs the data recipe of a corpus."""
    return shlex.join(
        [python(), *(_script(f"data/{corpus}/prepare.py") or ["-m", f"gptlite.recipes.{corpus}.prepare"])]
    )


def localized(text: str) -> str:
    """Return a help text with `gptlite COMMAND` and `python data/CORPUS/prepare.py` as typed in this environment."""
    text = RECIPE.sub(lambda match: recipe(match[1]), text)
    return CANONICAL.sub(lambda match: command(match[1]), text)


def _script(relative: str) -> list[str] | None:
    """Return [path of the script] if this package is in a checkout that contains the script, else None."""
    root = Path(gptlite.__file__).resolve().parents[1]
    file = root / relative
    if not ((root / "pyproject.toml").is_file() and file.is_file()):
        return None
    here = Path.cwd()
    return [str(file.relative_to(here) if file.is_relative_to(here) else file)]


def python() -> str:
    """Return `python` if that command starts this interpreter, else the path of the interpreter."""
    found = shutil.which("python")
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable
