"""Attendance of a rank in its worlds: its watch over the others, its last step, and the words on a change of worlds."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.files import open_inside, replacing
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import counted
from gptlite.satellites.elastic.roster import Member, Pulse, Roster, WorldChange
from gptlite.satellites.elastic.shelf import Shelf, read_notes, write_notes
from gptlite.satellites.elastic.silence import Silence, cut_connections
from gptlite.torch_private.distributed import default_store
from gptlite.trainer.observers import Watch

if TYPE_CHECKING:
    from gptlite.trainer.build import Run
    from gptlite.trainer.folder import RunFolder

UNWIND_SECONDS = 5.0  # from the loss of others until this rank has left its world; else its process ends
RESTARTS = "restarts.jsonl"
PARTS = "launcher", "meeting", "restoring", "first step"  # of the seconds from a loss to the next step
APPENDED = "train.log", "metrics.jsonl", "data_order.jsonl", RESTARTS  # files of a run to which rank 0 appends


class Attendance:
    """State of a rank's process in one world after another: `enter`, `meet`, `watch`, `note`, and `left` at the end.

    `gone` says how an earlier process of this rank has ended, "" if it has not.
    """

    def __init__(self, shelf: Shelf, pulse: Pulse) -> None:
        self.pulse, self.gone = pulse, ""
        self._shelf = shelf
        self._lost: float | None = None  # time of the loss that has ended the last world
        self._why = ""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._roster, self._change = Roster(), WorldChange([], [], [], 0, "", None)
        self._first_step: Callable[[], None] = lambda: None
        self._inside = False
        self._silence: Silence | None = None
        self._came = 0.0  # time at which the keeper has sent this rank into its world

    @property
    def restarted(self) -> bool:
        """True if this is not the first world of the run."""
        return self._roster.start > 1

    @property
    def reached(self) -> int | None:
        """Last step of the world before; None in the first world."""
        return self._change.step if self.restarted else None

    def enter(self) -> None:
        """Note that this rank is in a world from now on, so that it can be made to leave."""
        with self._lock:
            self._inside, self._came = True, time.time()

    def leave(self, why: str, silent: float = 0.0) -> None:
        """Make this rank leave its world, called from another thread: whatever waits for other ranks raises. `silent`
        are the seconds since the loss of others. Has no effect between two worlds."""
        with self._lock:
            if not self._inside or self._timer is not None:
                return
            self._timer = threading.Timer(UNWIND_SECONDS, os._exit, [1])  # blocked elsewhere: the keeper forks anew
            self._timer.daemon = True
            self._timer.start()
            self.note_loss(why, time.time() - silent)
        self.depart(why)

    def depart(self, why: str) -> None:
        """Tell the other ranks that this one leaves its world, and close the connections to them."""
        silence, self._silence = self._silence, None  # once: a store that does not answer takes half a second
        if silence is not None:
            silence.tell(why)
        with self._lock:
            if self._inside:
                cut_connections()

    def left(self) -> None:
        """Stop the timer of `leave`: this rank has left its world."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._inside, self._timer, self._first_step, self._silence = False, None, lambda: None, None

    def note_loss(self, why: str, when: float | None = None) -> None:
        """Note the time of a loss in seconds since 1970, by default now, and the reason, if this is the first."""
        self._lost = self._lost or when or time.time()
        self._why = self._why or why

    def member(self) -> Member:
        """Return what this rank tells the others of the next world."""
        step, ended = self.pulse.read()
        roster = Roster.of(read_notes(self._shelf.notes))
        return Member(self._shelf.node, step, ended, self._lost, self._why, self.gone, roster)

    def meet(self, members: list[Member], roster: Roster) -> None:
        """Take the roster of a new world, and write it to the notes of this node."""
        self._change, self._roster = WorldChange.of(members, roster), roster
        self._lost, self._why, self.gone = None, "", ""
        self._met = time.time()
        self._write_notes()

    def take_over(self, run_dir: Path) -> None:
        """Replace the files to which rank 0 appends by copies, if the last rank 0 may be frozen instead of gone.

        What it holds open, and its lock, are then no longer files of the run, should it run again. Called on rank 0.
        """
        if self._change.loss is None and not self._change.lost:
            return
        for name in APPENDED:
            if (path := run_dir / name).exists():
                with open_inside(run_dir, path, "rb") as old, replacing(path) as new:
                    shutil.copyfileobj(old, new)

    def watch(self, watch: Watch, mesh: Mesh) -> Watch:
        """Return the run's watch over the ranks, with one over their silence."""
        if mesh.world_size > 1:
            self._silence = Silence(default_store(), mesh.rank, mesh.world_size, self.leave)
        return Attending(watch, self, self._silence)

    def note(self, run: Run, folder: RunFolder) -> None:
        """Note the degrees of this world, and log what has changed. Called on all ranks once the run is restored."""
        before, state = self._roster.degrees, run.state
        degrees = {"data": run.mesh.data_size, "accumulation": state.loader.num_micro_batches}
        self._roster = replace(self._roster, degrees=degrees)
        self._write_notes()
        if not self.restarted or not run.mesh.is_main:
            return
        change, nodes = self._change, len(self._roster.present)
        pairs = {name: (before.get(name, value), value) for name, value in degrees.items()}
        folder.log(change.words(pairs, nodes))
        row = {
            "time": time.time(),
            "lost_step": change.step,
            "restored_step": state.step,
            "world": run.mesh.world_size,
            "nodes": nodes,
            **degrees,
            "cause": change.cause,
        }
        times = [change.loss or change.ended, self._came, self._met, time.time()]

        def write() -> None:
            ends = [*times[1:], time.time()]
            parts = {name: round(end - begin, 3) for name, begin, end in zip(PARTS, times, ends, strict=True)}
            seconds, repeated = ends[-1] - times[0], change.step - state.step + 1
            line = json.dumps(row | {"seconds": round(seconds, 3), "parts": parts})
            repeats = f", {counted(repeated, 'step')} repeated" if repeated > 0 else ""
            folder.log(f"went on with step {state.step:,} after {seconds:.1f} s{repeats}")
            with suppress(OSError), open_inside(folder.path, folder.path / RESTARTS, "a", encoding="utf-8") as file:
                file.write(line + "\n")

        self._first_step = write

    def stepped(self, step: int) -> None:
        """Note the end of a step."""
        self.pulse.write(step, time.time())
        self._first_step()
        self._first_step = lambda: None

    def _write_notes(self) -> None:
        if os.environ["LOCAL_RANK"] == "0":
            notes = read_notes(self._shelf.notes) or {}
            write_notes(self._shelf.notes, notes | {"roster": self._roster.notes()})


class Attending:
    """The watch of a rank in an elastic run: the run's watch, and the notes on its steps."""

    def __init__(self, watch: Watch, attendance: Attendance, silence: Silence | None) -> None:
        self._watch, self._attendance, self._silence = watch, attendance, silence
        self.communication = watch.communication
        self.ending: Callable[[Exception], None] = lambda error: None
        watch.ending = lambda error: self.ending(error)

    def verdict(self) -> None:
        """Depart, since this rank is about to leave its world by an exception: ranks that wait for it, and its own
        thread that saves, would do so until the watch ends them."""
        self._attendance.depart("")

    def close(self) -> None:
        """Stop watching."""
        if self._silence is not None:
            self._silence.close()
        self._watch.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager for a training step, whose end is noted."""
        with self._watch.step(number):
            yield
        self._attendance.stepped(number)
