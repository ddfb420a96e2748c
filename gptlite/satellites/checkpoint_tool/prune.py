"""Remove old checkpoints of a run: prune RUN keep=K [every=M] [damaged=true] [yes=true]

Prints which checkpoints to keep and which to remove; with yes=true, also removes them. The newest K are kept, and with
every=M also those of steps M, 2M, 3M, ... The newest checkpoint that passes verification of every byte is always kept;
if none passes, nothing is removed. Damaged checkpoints do not count towards K; damaged=true removes them. Folders that
dead processes have left (.tmp-, .trash-) are removed too. The run may be training at the same time.
"""

import errno
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.find import beyond, damage
from gptlite.documents import read_text
from gptlite.errors import ConfigError, printable, system_error
from gptlite.metrics.console import format_bytes
from gptlite.progress import counted, log
from gptlite.satellites.checkpoint_tool.places import has_writer, leftovers, roots, size_on_disk


@dataclass
class Options:
    """Options of the subcommand."""

    keep: int | None = None
    every: int = 0
    damaged: bool = False
    yes: bool = False


def run(paths: list[str], options: Options) -> int:
    """Print the plan and, with `yes`, carry it out."""
    if options.keep is None:
        raise ConfigError("keep is not set; give keep=K, the number of checkpoints to keep")
    if options.keep < 1 or options.every < 0:
        raise ConfigError(f"keep={options.keep}, every={options.every}: keep must be at least 1, every at least 0")
    root, *others = roots(paths[0])
    if others:
        raise ConfigError(f"{paths[0]} is a folder of several runs; give one of them")
    newest, stays, goes = plan(root, options.keep, options.every, options.damaged)
    for word, group in (("keep", stays), ("remove", goes)):
        for path, reason in group.items():
            print(printable(f"{word:<6}  {format_bytes(size_on_disk(path)):>9}  {path}  ({reason})"))
    print(f"{len(goes)} to remove, {format_bytes(sum(map(size_on_disk, goes)))}" if goes else "nothing to remove")
    if goes and not options.yes:
        print("nothing is removed yet; give yes=true to remove")
    elif goes:
        failed = _remove(root, newest, goes)
        print(f"removed {len(goes) - len(failed)} of {len(goes)}" if failed else "removed")
        for error in failed:
            print(f"error: {system_error(error)}", file=sys.stderr)
        return int(bool(failed))
    return 0


def plan(root: Path, keep: int, every: int, damaged: bool) -> tuple[Path | None, dict[Path, str], dict[Path, str]]:
    """Return the newest fully verified checkpoint, the paths to keep and the paths to remove, each with a reason.

    Reads whole checkpoints, newest first, until one is intact. Raises ConfigError if checkpoints exist and none is
    intact.
    """
    folders = store.step_folders(root)
    reasons = {folder: damage(folder, log) for folder in folders}
    newest = None
    for folder in folders:
        reasons[folder] = reasons[folder] or damage(folder, log, hashes=True)
        if not reasons[folder]:
            newest = folder
            break
    if folders and newest is None:
        raise ConfigError(
            f"{root}: {counted(len(folders), 'checkpoint')} found, but none is intact; delete unneeded ones by hand"
        )
    old = beyond(root, newest, keep, every, log) if newest else []
    stays, goes = {}, {}
    alive = has_writer(root)
    for folder in folders:
        if reasons[folder]:
            (goes if damaged else stays)[folder] = f"damaged: {reasons[folder]}"
        elif folder in old:
            goes[folder] = f"older than the newest {keep}"
        else:
            stays[folder] = "every byte is verified" if folder == newest else "among those to keep"
    for left in leftovers(root):
        if left.name.startswith("damaged-"):
            (goes if damaged else stays)[left] = "set aside as damaged"
        elif left.name.startswith("superseded-"):
            stays[left] = "set aside after a loss spike; delete it by hand"
        elif alive is False:
            goes[left] = "left by a process that died"
        else:
            stays[left] = "a process may still be using it"
    return newest, stays, goes


def _remove(root: Path, newest: Path | None, goes: Iterable[Path]) -> list[OSError]:
    """Remove the paths, and return the errors of those that cannot be removed."""
    failed: list[OSError] = []
    with store.writing(root, log):  # removes leftovers of dead processes, never files of a live one
        for folder in goes:
            try:
                if not folder.name.startswith("."):
                    store.remove(folder)
                elif folder.exists():
                    raise OSError(errno.ENOTEMPTY, "cannot be removed", str(folder))
            except OSError as error:
                failed.append(error)
        latest = root / "latest"
        if newest is not None and latest.exists() and not (root / read_text(latest).strip()).is_dir():
            store.point_latest(newest)
    return failed
