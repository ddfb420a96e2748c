"""List the checkpoints of runs, newest first: ls PATH ... [hashes=true]

PATH is a run folder, its checkpoints folder, or a folder of runs, which is searched three levels deep. A checkpoint
counts as intact if all files have the sizes in its manifest; hashes=true verifies every byte, as resuming does. Below
the table are folders that a process is writing or deleting, or that a dead process left unfinished (.tmp-, .trash-),
and checkpoints set aside (damaged-, superseded-). Times are UTC. The exit code is 1 if a checkpoint is damaged.
"""

from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.find import damage
from gptlite.checkpoint.manifest import DamagedCheckpoint, read_manifest
from gptlite.errors import printable
from gptlite.metrics.console import format_bytes, format_count, table
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import has_writer, leftovers, roots, size_on_disk, when

HEADER = ("step", "tokens", "written", "age", "size", "best val", "layout", "status")


@dataclass
class Options:
    """Options of the subcommand."""

    hashes: bool = False


def run(paths: list[str], options: Options) -> int:
    """Print a table for each run. Return 1 if a checkpoint is damaged."""
    any_damaged = False
    for root in dict.fromkeys(root for path in paths for root in roots(path)):
        print(printable(root))
        any_damaged |= _list(root, options.hashes)
    return int(any_damaged)


def _list(root: Path, hashes: bool) -> bool:
    folders = store.step_folders(root)
    reasons = {folder: damage(folder, log, hashes=hashes) for folder in folders}
    auto = next((folder for folder in folders if not reasons[folder]), None)
    if folders:
        rows = [_row(folder, reasons[folder], hashes, folder == auto) for folder in folders]
        print(*table(HEADER, rows, right="step tokens age size"), sep="\n")
    else:
        print("  no checkpoint")
    alive = has_writer(root)
    for left in leftovers(root):
        print(printable(f"  {left.name}  {format_bytes(size_on_disk(left))}, {_about(left, alive)}"))
    return any(reasons.values())


def _row(folder: Path, reason: str, hashes: bool, auto: bool) -> tuple[str, ...]:
    step = str(store.step_of(folder))
    status = f"DAMAGED: {reason}" if reason else "intact to the byte" if hashes else "intact"
    status += "  <- resumes here" if auto else ""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint:
        return step, "", "", "", format_bytes(size_on_disk(folder)), "", "", status
    meta, (date, age) = manifest.meta, when(manifest.created)
    tokens, best = meta.get("tokens"), meta.get("best_val_loss")
    return (
        step,
        "n/a" if tokens is None else format_count(tokens),
        date,
        age,
        format_bytes(size_on_disk(folder)),
        "n/a" if best is None else f"{best:.4f}",
        str(manifest.environment.get("layout", "n/a")),
        status,
    )


def _about(left: Path, alive: bool | None) -> str:
    if left.name.startswith("damaged-"):
        return "damaged, moved aside by a new save; delete it by hand"
    if left.name.startswith("superseded-"):
        return "set aside after a loss spike, when the run went back to an earlier checkpoint; delete it by hand"
    word = "written" if left.name.startswith(".tmp-") else "deleted"
    if alive is None:
        return f"being {word}, or left by a process that died (unknown, as this file system has no locks)"
    return f"being {word}" if alive else "left by a process that died; the next save or prune removes it"
