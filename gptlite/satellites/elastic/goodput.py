"""Goodput: the share of a run's time, since its first start, in which it took new steps, and causes of the rest."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.documents import read_json
from gptlite.files import write_whole
from gptlite.progress import format_duration
from gptlite.satellites.plan.interval import Failures, mtbf_of
from gptlite.trainer.observers import Observer

if TYPE_CHECKING:
    from gptlite.config.schema import Config
    from gptlite.metrics.meter import Throughput
    from gptlite.trainer.folder import RunFolder
    from gptlite.trainer.state import TrainState
    from gptlite.trainer.step import StepResult

FILE = "goodput.json"  # in the run folder
STEPS, RESTARTS, SAVES, REPEATED, START = "steps", "restarts", "checkpoints", "repeated steps", "start"
CAUSES = (RESTARTS, SAVES, REPEATED, "evaluation", START, "other")  # of time that is not useful, in order of the report
WRITE_SECONDS = 1.0  # a process that is killed leaves no account of its last steps, of this time or of one step
PAUSE_SECONDS = 600.0  # a stop of an elastic run by a signal is a restart, if the run goes on within this time


@dataclass
class Account:
    """Time of a run since its first start, over all its processes. Pauses after an orderly end are left out.

    `seconds` are by cause; the useful ones are STEPS. `until` is the end of the account in seconds since 1970,
    `highest` the last step ever taken, `saves` and `restarts` the numbers of both. `ended`: `done` after an orderly
    end, `signal` after the end by a signal in an elastic run, else empty.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    until: float = 0.0
    highest: int = 0
    new_steps: int = 0
    saves: int = 0
    restarts: int = 0
    ended: str = ""

    def add(self, cause: str, seconds: float) -> None:
        """Add time that was spent on a cause, or on STEPS."""
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def shares(self) -> dict[str, float]:
        """Return the share of STEPS and of each of CAUSES. They add up to 1; without any time, all are 0."""
        total = sum(self.seconds.values())
        return {cause: self.seconds.get(cause, 0.0) / total if total else 0.0 for cause in (STEPS, *CAUSES)}


class Goodput(Observer):
    """Account of a run's time, in a file of its folder. Entries of rows: `goodput`; figures: `goodput` and
    `goodput_causes`.

    Time counts from `began`, the time.monotonic() of the command's start. The first step of a process belongs to its
    start as far as it takes longer than the second. After a failure, everything up to then is a restart. `throughput`
    measures evaluations and saves. `clocks` are time.monotonic and time.time.
    """

    def __init__(
        self,
        folder: RunFolder,
        throughput: Throughput,
        began: float,
        clocks: tuple[Callable[[], float], Callable[[], float]] = (time.monotonic, time.time),
    ) -> None:
        self._folder, self._spent, self._config = folder, throughput.spent, folder.config
        self._clock, self._now = clocks
        here = folder.resume_from is not None and folder.resume_from.resolve().is_relative_to(folder.path.resolve())
        self.account = read_account(folder.path) if here else Account()
        self._cause, self._since = START, began
        self._continue(began)
        self._counted: Counter[str] = Counter()  # of what `throughput` has measured
        self._begins, self._held = self._cause, 0.0  # cause of the process's start, and its first step's seconds
        self._begun = self._taken = 0  # the last step begun, and the number of steps taken by this process
        self._net, self._stepping, self._written = 0.0, STEPS, self._clock()

    def _continue(self, began: float) -> None:
        """Take over the account of an earlier process. The time since its end counts, unless it was a pause."""
        account, clock = self.account, self._clock()
        pause = self._now() - (clock - began) - account.until
        if account.until and (not account.ended or (account.ended == "signal" and pause < PAUSE_SECONDS)):
            self._cause = RESTARTS
            account.restarts += 1
        if account.until and (self._cause == RESTARTS or pause < 0):  # `began` may be that of the launcher
            self._since = min(clock, began - pause)
        account.ended = ""

    def before(self, state: TrainState) -> None:
        """Begin the account of a step."""
        number = state.step + 1
        self._turn(self._begins if self._taken == 0 else self._kind(number))
        if self._taken == 0 and self._begun == 0:
            self._net = 0.0  # without imports and building
            self._stepping = self._kind(number)
        self._begun = number

    def after(self, result: StepResult) -> None:
        """End it, unless the next step has begun already."""
        account, kind = self.account, self._kind(result.step)
        self._turn("other" if result.step == self._begun else self._cause)
        self._taken += 1
        if self._taken == 1:
            self._held = self._net
            if result.step != self._begun:
                self._cause = self._kind(self._begun)
        elif self._held:  # the first step has compiled, allocated and connected; the second tells what is left of it
            usual = min(self._held, self._net)
            account.add(self._begins, -usual)
            account.add(self._stepping, usual)
            self._held = 0.0
        self._net = 0.0
        account.new_steps += kind == STEPS
        account.highest = max(account.highest, result.step)
        if self._clock() - self._written >= WRITE_SECONDS:
            self._write()

    def ended(self, state: TrainState) -> None:
        """Note that the run ends in order. Only its last evaluation and save follow."""
        self._turn(SAVES)
        goes_on = self._config.parallelism.elastic and state.clock < self._config.trainer.last_step
        self.account.ended = "signal" if goes_on else "done"

    def close(self) -> None:
        """End the account. After a failure, the time since the last step is part of the restart."""
        if not self.account.ended:
            self._cause = RESTARTS
        self._turn("other")
        self._write(synced=True)

    def entries(self) -> dict[str, Any]:
        """Return the goodput so far."""
        return {"goodput": round(self.account.shares()[STEPS], 6)}

    def figures(self) -> dict[str, Any]:
        """Return the goodput so far, and the share of each cause. With the goodput, they add up to 1."""
        shares = self.account.shares()
        return {"goodput": shares.pop(STEPS), "goodput_causes": shares}

    def closing(self) -> list[tuple[str, str]]:
        """Return the line on goodput, and after losses the prediction."""
        lines, planned = [("goodput", words(self.account.shares()))], planned_words(self.account, self._config)
        return [*lines, ("", planned)] if planned else lines

    def _kind(self, number: int) -> str:
        return REPEATED if number <= self.account.highest else STEPS

    def _turn(self, cause: str) -> None:
        """Count the time since the last call for the present cause, except what `throughput` has measured, and go on
        with another."""
        now, account = self._clock(), self.account
        seconds, self._since = now - self._since, now
        new = {name: spent - self._counted[name] for name, spent in self._spent.items() if spent > self._counted[name]}
        for name, spent in new.items():
            account.add(name, spent)
            self._counted[name] = self._spent[name]
        account.saves += SAVES in new
        net = seconds - sum(new.values())
        account.add(self._cause, net)
        self._net += net * (self._cause != "other")  # of steps only
        self._cause = cause

    def _write(self, synced: bool = False) -> None:
        self._written = self._clock()
        self.account.until = self._now()
        path, text = self._folder.path / FILE, json.dumps(asdict(self.account)) + "\n"
        if not self._folder.mesh.is_main:
            return
        with suppress(OSError):  # e.g. a full disk: the next save fails with a message
            if synced:
                return write_whole(path, text)
            new = path.with_name(f".tmp-{FILE}")
            new.unlink(missing_ok=True)  # of a killed process
            with open(new, "x", encoding="utf-8") as file:  # not synced, which would take milliseconds each time
                file.write(text)
            os.replace(new, path)


def read_account(folder: Path) -> Account:
    """Return the account in a run folder; an empty one if there is none, or if it is damaged."""
    with suppress(OSError, ValueError, TypeError):
        return Account(**read_json(folder / FILE, dict[str, Any]))
    return Account()


def words(shares: Mapping[str, float]) -> str:
    """Return e.g. `98.7%: restarts 0.6%, checkpoints 0.7%`. The numbers add up to 100.0%."""
    tenths = {cause: int(1000 * share) for cause, share in shares.items()}
    rest = sorted(shares, key=lambda cause: tenths[cause] - 1000 * shares[cause])
    for cause in rest[: 1000 - sum(tenths.values()) if any(shares.values()) else 0]:
        tenths[cause] += 1
    parts = ", ".join(f"{cause} {tenths[cause] / 10:.1f}%" for cause in CAUSES if tenths.get(cause))
    return f"{tenths[STEPS] / 10:.1f}%{f': {parts}' if parts else ''}"


def planned_words(account: Account, config: Config) -> str:
    """Return the goodput that Daly's model predicts for a run with losses, beside the measured one, and the best
    interval; empty for a run without losses or saves.

    Only time in steps, saves and restarts counts, which is what the model knows. The time between losses is that of
    `cluster.mtbf_hours`, else as measured, without the restarts.
    """
    shares = {cause: account.seconds.get(cause, 0.0) for cause in (STEPS, RESTARTS, SAVES, REPEATED)}
    memory, disk, hours = config.checkpoint.memory_steps, config.checkpoint.interval, config.cluster.mtbf_hours
    interval, total = memory or disk, sum(shares.values())
    if not (account.restarts and account.saves and account.new_steps and interval):
        return ""
    step = shares[STEPS] / account.new_steps
    mtbf = mtbf_of(hours, config.cluster.nodes or 1) if hours else (total - shares[RESTARTS]) / account.restarts
    failures = Failures(mtbf, shares[SAVES] / account.saves, shares[RESTARTS] / account.restarts)
    key, best = "checkpoint.memory_interval" if memory else "checkpoint.interval", failures.best_steps(step)
    planned, most = (failures.goodput(steps * step, in_restarts=bool(hours)) for steps in (interval, best))
    return (
        f"of steps, saves and restarts: {shares[STEPS] / total:.1%}, planned {planned:.1%} with {key}={interval} and a "
        f"loss every {format_duration(mtbf)}{'' if hours else ' of them'}; best {key}={best}: {most:.1%}"
    )
