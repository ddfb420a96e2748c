"""Checkpoints of one run: saving them, keeping the newest, finding the one to go on from."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gptlite.checkpoint import dcp, store
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.find import find_checkpoint, newest_intact
from gptlite.checkpoint.load import read_meta
from gptlite.checkpoint.manifest import DamagedCheckpoint, verify, write_manifest
from gptlite.errors import ConfigError
from gptlite.progress import Log


class SavesItself(Protocol):
    """What a tokenizer is to a checkpoint."""

    def save(self, folder: Path) -> None:
        """Writes its files into an existing folder."""


class Checkpointer:
    """Writes to and finds in `<run_dir>/checkpoints`. Making one touches nothing on disk."""

    def __init__(self, config: CheckpointConfig, run_dir: Path):
        self.config = config
        self.root = Path(run_dir) / "checkpoints"

    def save(
        self,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        config_yaml: str,
        tokenizer: SavesItself | None,
        log: Log,
    ) -> Path:
        """Commits a checkpoint of step `meta["step"]` and returns its folder; older ones beyond `keep` go after that.

        `tensors` are under global names, a tied weight once. `meta` is JSON. An intact checkpoint of that step is
        left as it is. Until the last rename everything has a hidden name, so a failure at any point leaves
        the checkpoints as they were. Raises OSError (disk full, say), TypeError (`meta` is not JSON).
        """
        final = self.root / store.step_name(meta["step"])
        with store.writing(self.root, log):
            if _make_way(final, log):
                with store.staged(final) as folder:
                    self._write(folder, tensors, meta, config_yaml, tokenizer, log)
            store.point_latest(final)
            self._retain(final, log)
        return final

    def find(self, resume: str, log: Log = print) -> Path | None:
        """The verified step folder to start from; None for a fresh start. Each one rejected is logged with the reason.

        `resume`: auto (the newest intact one of this run), never, or the path of a step, checkpoints or run folder.
        Raises ConfigError if a path holds no intact checkpoint, if all of this run's are damaged (starting over
        is for a person to decide), or if this run already holds steps that the new start would run into.
        """
        held = store.step_folders(self.root)
        if resume == "auto" and self.config.load == "all":
            fix = "move them away to start over, or give checkpoint.resume another path"
            return newest_intact(held, str(self.root), fix, log) if held else None
        found = None
        if resume not in ("auto", "never"):
            found = find_checkpoint(resume, "checkpoint.resume", log, words=("auto", "never"))
        start = read_meta(found)["step"] if found and self.config.load == "all" else 0
        if held and (store.step_of(held[0]) or 0) > start:
            key = f"checkpoint.load={self.config.load}" if resume == "auto" else f"checkpoint.resume={resume}"
            raise ConfigError(
                f"{key} starts from step {start}, but {self.root} already holds {held[0].name}; take another run.dir, "
                "or checkpoint.resume=auto checkpoint.load=all to go on from there"
            )
        return found

    def _write(
        self,
        folder: Path,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        config_yaml: str,
        tokenizer: SavesItself | None,
        log: Log,
    ) -> None:
        dcp.write(folder / "data", tensors, log)
        (folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        if tokenizer is not None:
            (folder / "tokenizer").mkdir()
            tokenizer.save(folder / "tokenizer")
        write_manifest(folder, tensors, meta, log)

    def _retain(self, saved: Path, log: Log) -> None:
        """Removes intact checkpoints beyond the newest `keep`. A damaged one neither counts nor goes."""
        if self.config.keep == 0:
            return
        intact = [folder for folder in store.step_folders(self.root) if _looks_intact(folder, log)]
        for folder in intact[self.config.keep :]:
            if folder != saved:
                store.remove(folder)


def _make_way(final: Path, log: Log) -> bool:
    """Whether the step is to be written: not if it is there intact. A damaged one is moved aside, not deleted."""
    if not final.exists():
        return True
    try:
        verify(final, log)
    except DamagedCheckpoint as error:
        log(f"checkpoint: moving {final} to {store.set_aside(final).name}: {error.reason}")
        return True
    return False


def _looks_intact(folder: Path, log: Log) -> bool:
    try:
        verify(folder, log, hashes=False)
    except DamagedCheckpoint:
        return False
    return True
