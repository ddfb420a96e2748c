"""Which checkpoints stay."""

from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.manifest import DamagedCheckpoint, verify
from gptlite.progress import Log


def beyond(root: Path, saved: Path, keep: int, every: int, log: Log) -> list[Path]:
    """Folders beyond the newest `keep` intact ones, but for multiples of `every` steps and `saved`. 0 keeps all.

    Intact by sizes. A damaged one neither counts nor goes: it may be all that is left of something, which a person
    decides.
    """
    if keep == 0:
        return []
    intact = [folder for folder in store.step_folders(root) if _looks_intact(folder, log)]
    return [folder for folder in intact[keep:] if folder != saved and not _stays(folder, every)]


def _stays(folder: Path, every: int) -> bool:
    return every > 0 and (store.step_of(folder) or 0) % every == 0


def _looks_intact(folder: Path, log: Log) -> bool:
    try:
        verify(folder, log, hashes=False)
    except DamagedCheckpoint:
        return False
    return True
