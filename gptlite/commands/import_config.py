"""Translate a DeepSpeed JSON file to overrides. Each key is taken, a no-op (without effect here), or refused.

gptlite import-config ds_config.json [ranks=N]

ranks: the number of data-parallel ranks, used to check the batch keys and to compute a missing train_batch_size. The
last line is the command that trains with these overrides. `gptlite train deepspeed=ds_config.json` does the same; its
other arguments take precedence over the file. Exit codes: 0 translated, 2 keys are refused.
"""

import shlex
import shutil
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from gptlite.commands.train import run_command
from gptlite.config.command_line import Subcommand, parse_arguments, separate
from gptlite.errors import ConfigError, printable
from gptlite.invocation import command
from gptlite.satellites.deepspeed.expand import overrides_of
from gptlite.satellites.deepspeed.file import read
from gptlite.satellites.deepspeed.rows import Row, Verdict
from gptlite.satellites.deepspeed.translate import translate

NARROW, WIDE = 60, 120
KEYS = 32  # width of the column of keys


@dataclass
class Arguments:
    """Command-line arguments besides the file."""

    ranks: int | None = None


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(arguments: list[str]) -> int:
    """Print the translation and return the exit code. Raises ConfigError for a file that cannot be read."""
    (path,), options = separate("import-config", Subcommand("", ("FILE",)), arguments, ["ranks"])
    ranks = parse_arguments(Arguments, options).ranks
    if ranks is not None and ranks < 1:
        raise ConfigError(f"ranks={ranks} must be at least 1")
    rows = translate(read(path, key=""), ranks)
    print(printable(report(path, rows, min(max(shutil.get_terminal_size().columns, NARROW), WIDE)), "\n"))
    return 2 if any(row.verdict is Verdict.refused for row in rows) else 0


def report(path: str, rows: list[Row], width: int) -> str:
    """Return the table, at most `width` columns wide, and the command that trains with the overrides."""
    counts = Counter(row.verdict for row in rows)
    lines = [f"{path}: " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict), ""]
    section = ""
    for row in rows:
        above, _, name = row.key.partition(".")
        if name and above != section:
            lines.append(above)
        section = above if name else ""
        lines += _lines(f"  {row.text.partition('.')[2]}" if name else row.text, row, width)
    if counts[Verdict.refused]:
        return "\n".join([*lines, "", "Change or remove the refused keys, or supply what their reasons ask for."])
    return "\n".join([*lines, "", f"{command('train')} {shlex.join(overrides_of(rows))}"])


def _lines(key: str, row: Row, width: int) -> list[str]:
    """Return the lines of a row. A key that is too long for its column has a line of its own."""
    reason = f"({row.reason})" if row.overrides and row.reason else row.reason
    text = " ".join([*row.overrides, reason]).strip()
    left = f"{key:<{KEYS}} {row.verdict.value:<8} "
    indent = " " * (KEYS + 10)
    if len(key) > KEYS:
        left = f"{'':<{KEYS}} {row.verdict.value:<8} "
    wrapped = textwrap.wrap(
        text, width, initial_indent=left, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [left.rstrip()]
    return [key, *wrapped] if len(key) > KEYS else wrapped
