"""Command `gptlite COMMAND ...`, also `python -m gptlite`. Only the command's module is imported."""

import os
import sys
from importlib import import_module
from typing import NoReturn

from gptlite import __version__
from gptlite.errors import did_you_mean
from gptlite.invocation import COMMANDS, prepare_process

HELP = """\
gptlite: GPT pretraining with Hydra configuration.

{commands}

`gptlite COMMAND --help` shows the help of a command. Without a command, KEY=VALUE arguments and Hydra's flags are
passed to train.
--version prints the version. --traceback, beside any arguments, prints the traceback of an error too."""


def main() -> NoReturn:
    """Run the command that the first argument names, or train if it is KEY=VALUE or a flag. Exit with its exit code."""
    prepare_process()
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help", "help"):
        lines = [f"  {name:<16} {summary}" for name, (_, summary) in COMMANDS.items()]
        print(HELP.format(commands="\n".join(lines)))
        sys.exit(0)
    if word in ("-V", "--version", "version"):
        print(f"gptlite {__version__}")
        sys.exit(0)
    if word in COMMANDS:
        del sys.argv[1]  # the command's parser reads sys.argv
    elif "=" in word or word.startswith(("-", "~")):
        word = "train"
    else:
        hint = did_you_mean(word, COMMANDS)
        message = f"error: {word} is neither a gptlite command nor KEY=VALUE{hint}; --help lists the commands"
        print(message, file=sys.stderr)
        sys.exit(2)
    if word == "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        from gptlite.satellites.elastic.proxy import go_on

        go_on()  # if this worker is of a restart of an elastic run
    if word == "sweep":
        sys.argv.insert(1, "--multirun")
    import_module(COMMANDS[word][0]).main()
    sys.exit(0)


if __name__ == "__main__":
    main()
