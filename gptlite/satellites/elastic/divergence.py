"""Return of a run to a checkpoint from before its copies of parameters differed (`trainer.on_divergence=restore`)."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gptlite.checkpoint import store
from gptlite.documents import read_json
from gptlite.errors import RunEnded
from gptlite.files import write_whole
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.satellites.monitor.replicas import ReplicaCheck, ReplicasDiffer
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import due

if TYPE_CHECKING:
    from gptlite.trainer.state import TrainState

FILE = "divergence.json"  # in the run folder: the number of returns, and of differences by node
MOST = 3  # returns of a run


class GoingBack(RunEnded):
    """Raised on all ranks to build the run again from the checkpoint that is now the newest.

    `checked` is the last step whose copies were equal. `leaving` is the node that leaves an elastic run, since its
    copies have differed twice; empty if none does.
    """

    everywhere = False  # raised on, without a line on an error

    def __init__(self, message: str, mesh: Mesh, checked: int, leaving: str) -> None:
        super().__init__(message)
        self.mesh, self.checked, self.leaving = mesh, checked, leaving


class RestoringCheck(ReplicaCheck):
    """Replica check, also before each checkpoint, after which the run goes back instead of ending.

    A difference has arisen after the last check that passed, so checkpoints of later steps are renamed, and the run is
    built again from the newest one left. The state at the start of a process counts as checked, as all ranks have
    loaded the same. `node` names this rank's node.
    """

    def __init__(self, folder: RunFolder, step: int, node: str | None = None) -> None:
        super().__init__(folder.config.trainer.replica_check_interval, node)
        self._folder, self._saves, self._passed = folder, folder.config.checkpoint.interval, step

    def reads(self, state: TrainState) -> bool:
        """Return True if a check or a save is due after this step."""
        return super().reads(state) or due(state.step, self._saves)

    def passed(self, state: TrainState) -> None:
        """Note the step."""
        self._passed = state.step

    def settled(self, state: TrainState) -> None:
        """Check if it is due. Raises GoingBack, or ReplicasDiffer if the run cannot go back."""
        try:
            return super().settled(state)
        except ReplicasDiffer as error:
            message, nodes = str(error), error.nodes
        self._folder.finish_saves()
        again, text, leaving = from_main(self._folder.mesh, lambda: self._decide(nodes))
        if not again:
            raise ReplicasDiffer(f"{message}; {text}", nodes)
        self._folder.log(f"{message}; {text}")
        raise GoingBack(message, self._folder.mesh, self._passed, leaving)

    def _decide(self, nodes: tuple[str, ...]) -> tuple[bool, str, str]:
        """Return whether the run goes back, the reason or the checkpoint, and the node that leaves. Rename later
        checkpoints."""
        path, root = self._folder.path / FILE, self._folder.path / "checkpoints"
        known: dict[str, Any] = {"returns": 0, "nodes": {}}
        with suppress(OSError, ValueError):
            known = read_json(path, dict[str, Any])
        if known["returns"] >= MOST:
            return False, f"the run has already gone back {MOST} times", ""
        held = store.step_folders(root)
        good = [folder for folder in held if (store.step_of(folder) or 0) <= self._passed]
        if held and not good:
            return False, f"no checkpoint is of step {self._passed}, the last that was checked, or before", ""
        known["returns"] += 1
        for node in nodes:
            known["nodes"][node] = known["nodes"].get(node, 0) + 1
        write_whole(path, json.dumps(known) + "\n")
        for folder in held[: len(held) - len(good)]:
            aside = store.set_aside(folder, "superseded")
            self._folder.log(f"checkpoint: renamed {folder.name} to {aside.name}: copies have differed since")
        if good:
            store.point_latest(good[0])
        twice = next((node for node in nodes if known["nodes"][node] > 1), "")
        start = good[0].name if good else "the start of the run"
        return True, f"going back to {start} ({known['returns']} of at most {MOST} times)", twice
