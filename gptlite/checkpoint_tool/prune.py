"""Removes old checkpoints of a run: prune RUN keep=K [every=M] [damaged=true] [yes=true]

Says what would stay and what would go; yes=true then does it. The newest K stay, and with every=M those of steps M, 2M,
3M, ... The newest one whose every byte is right always stays, and nothing goes if there is none. Damaged ones neither
count nor go, unless damaged=true. What dead processes left (.tmp-, .trash-) goes too. A run may be training meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.retention import beyond
from gptlite.checkpoint_tool.places import damage, has_writer, leftovers, roots, size_on_disk
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.progress import log


@dataclass
class Options:
    """What may follow the path."""

    keep: int | None = None
    every: int = 0
    damaged: bool = False
    yes: bool = False


@dataclass(frozen=True)
class Plan:
    """What stays, with the reason, and what goes. `newest` is right in every byte."""

    newest: Path | None
    stays: dict[Path, str]
    goes: dict[Path, str]


def run(paths: list[str], options: Options) -> int:
    """Prints the plan and, with `yes`, carries it out."""
    if options.keep is None:
        raise ConfigError("keep is not set; give keep=K, the number of checkpoints that stay")
    if options.keep < 1 or options.every < 0:
        raise ConfigError(f"keep={options.keep}, every={options.every}: at least keep=1, and every=0 or more")
    root, *others = roots(paths[0])
    if others:
        raise ConfigError(f"{paths[0]} is a folder of several runs; give one of them")
    chosen = plan(root, options.keep, options.every, options.damaged)
    print(*describe(chosen), sep="\n")
    if chosen.goes and not options.yes:
        print("nothing is removed yet; give yes=true")
    elif chosen.goes:
        _remove(root, chosen)
        print("removed")
    return 0


def plan(root: Path, keep: int, every: int, damaged: bool) -> Plan:
    """What to do below `root`. Reads checkpoints whole, newest first, until one is right in every byte.

    Raises ConfigError if there are checkpoints and none is.
    """
    folders = store.step_folders(root)
    reasons = {folder: damage(folder) for folder in folders}
    verified = None
    for folder in folders:
        if not reasons[folder]:
            reasons[folder] = damage(folder, hashes=True)
            if not reasons[folder]:
                verified = folder
                break
    if folders and verified is None:
        raise ConfigError(
            f"{root}: none of the {len(folders)} checkpoints is intact; delete by hand what is not needed"
        )
    old = beyond(root, verified, keep, every, log) if verified else []
    stays, goes = {}, {}
    alive = has_writer(root)
    for folder in folders:
        if reasons[folder]:
            (goes if damaged else stays)[folder] = f"damaged: {reasons[folder]}"
        elif folder in old:
            goes[folder] = f"older than the newest {keep}"
        else:
            stays[folder] = "every byte is right" if folder == verified else "one to keep"
    for left in leftovers(root):
        if left.name.startswith("damaged-"):
            (goes if damaged else stays)[left] = "set aside as damaged"
        elif left.name.startswith("superseded-"):
            stays[left] = "set aside after a spike: delete it by hand"
        elif alive is False:
            goes[left] = "left by a process that died"
        else:
            stays[left] = "a process may be at work on it"
    return Plan(verified, stays, goes)


def describe(chosen: Plan) -> Iterator[str]:
    """A line for each, and one for the sum."""
    for word, group in (("keep", chosen.stays), ("remove", chosen.goes)):
        for path, reason in group.items():
            yield f"{word:<6}  {format_bytes(size_on_disk(path)):>9}  {path}  ({reason})"
    size = format_bytes(sum(map(size_on_disk, chosen.goes)))
    yield f"{len(chosen.goes)} to remove, {size}" if chosen.goes else "nothing to remove"


def _remove(root: Path, chosen: Plan) -> None:
    with store.writing(root, log):  # which removes what dead processes left; a living one's is not ours to touch
        for folder in chosen.goes:
            if not folder.name.startswith("."):
                store.remove(folder)
        latest = root / "latest"
        if chosen.newest is not None and latest.exists() and not (root / latest.read_text().strip()).is_dir():
            store.point_latest(chosen.newest)
