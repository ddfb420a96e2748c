"""File systems that are small or cannot be written, for processes that have their mounts to themselves (Linux).

The functions run in a ForkServer that was started with PRIVATE; nobody else sees what it mounts.
"""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint.destruction.forks import PRIVATE


@cache
def allowed() -> bool:
    """Whether this machine lets us mount in a namespace of our own."""
    if not shutil.which("unshare"):
        return False
    command = [*PRIVATE, "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp"]
    return subprocess.run(command, capture_output=True).returncode == 0


def mount_small(folder: str, megabytes: float) -> None:
    """A file system of its own at an empty folder."""
    size = f"size={int(megabytes * 1024)}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True)


def mount_read_only(source: str, folder: str) -> None:
    """The tree of `source` at an empty folder, where it cannot be written, not even by root."""
    subprocess.run(["mount", "--bind", source, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def look(run: str) -> dict[str, Any]:
    """What a run folder holds: steps that verify, newest first; the one found; hidden leftovers; the end in words."""
    from gptlite.checkpoint.checkpointer import Checkpointer
    from gptlite.checkpoint.config import CheckpointConfig
    from gptlite.checkpoint.manifest import verify
    from gptlite.checkpoint.store import step_folders

    root = Path(run) / "checkpoints"
    folders = step_folders(root)
    for folder in folders:
        verify(folder, print)
    found = Checkpointer(CheckpointConfig(), Path(run)).find("auto")
    assert found == folders[0]
    hidden = sorted(path.name for path in root.iterdir() if path.name.startswith(".t"))
    return {"steps": [int(folder.name[5:]) for folder in folders], "hidden": hidden}


def copy(source: str, target: str) -> None:
    """Out of a mount that others do not see."""
    shutil.copytree(source, target)


def remove(path: str) -> None:
    """Frees what `fill` has taken."""
    Path(path).unlink()


def generate(checkpoint: str) -> int:
    """`gptlite generate`, with a prompt of a number."""
    from gptlite.commands.generate import Arguments, write_samples
    from gptlite.commands.train import guarded

    return guarded(lambda: write_samples(Arguments(checkpoint=checkpoint, prompt="7", max_tokens=3)))
