"""Train random legal configurations, and compare each with one process; check the refusals of the others.

gptlite certify fuzz [minutes=30] [seed=7] [count=0] [output=fuzz] [timeout=120] [resume=10] [ranks=8]

Configurations are drawn from all keys that change numbers or layouts, of up to `ranks` ranks: first so that each two
values that can be legal together meet, then at random. Each trains two steps of a tiny model on gloo ranks, and all
losses, gradients, values and buffers must agree with those of one process within the limits of `gptlite parity`. Every
tenth (`resume`; 0: none) also saves a checkpoint for one process, and resumes from that of one process. Where the
checks refuse a draw on the way, the message must be one line with a key, its value and a fix that mends it.

A failure is minimised: values are reset to their defaults for as long as it still fails. The command that shows it is
printed, and written to OUTPUT/failure-N.txt. OUTPUT/layouts.csv has a row for each configuration; if the file exists,
its configurations that agreed are not run again. `count` ends the run after that many configurations (0: never), and
`timeout` is the time in seconds after which one counts as hanging. The draws depend on the seed alone.

Exit codes: 0 no failure, 1 failures, 2 refused arguments, 130 after Ctrl-C, which prints the summary too.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gptlite.config.command_line import parse_arguments
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.progress import counted, format_duration
from gptlite.satellites.certify.fuzz.axes import AXES, LARGEST_WORLD, Draw, overrides, row_name, world
from gptlite.satellites.certify.fuzz.draw import Drawing
from gptlite.satellites.certify.fuzz.layouts import Layouts
from gptlite.satellites.certify.fuzz.legal import refusal
from gptlite.satellites.certify.fuzz.minimise import minimised
from gptlite.satellites.certify.fuzz.oracle import STEPS, Judgement, Oracle
from gptlite.satellites.certify.fuzz.ranks import RankPool
from gptlite.satellites.certify.fuzz.refusals import cause, complaint

REPORT = 10.0  # seconds between two lines of progress


@dataclass
class Options:
    """Command-line options."""

    minutes: float = 30.0
    seed: int = 7
    count: int = 0
    output: str = "fuzz"
    timeout: float = 120.0
    resume: int = 10
    ranks: int = LARGEST_WORLD


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code. Raises ConfigError for options out of range."""
    options = parse_arguments(Options, arguments)
    for key, least, example in (
        ("minutes", 0, 30),
        ("timeout", 0, 120),
        ("count", -1, 0),
        ("seed", -1, 7),
        ("resume", -1, 10),
        ("ranks", 1, 8),
    ):
        if not getattr(options, key) > least:
            raise ConfigError(f"{key}={getattr(options, key):g} must be above {least}, e.g. {key}={example}")
    if options.ranks > LARGEST_WORLD:
        raise ConfigError(f"ranks={options.ranks} is more than the grammar has; use at most {LARGEST_WORLD}")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    with RankPool(LARGEST_WORLD) as ranks:
        fuzz = Fuzz(Drawing(options.seed, options.ranks), Oracle(ranks, options.timeout), folder, options)
        try:
            fuzz.run()
        finally:  # after Ctrl-C too
            fuzz.oracle.close()
            print(fuzz.summary(), flush=True)
    return 1 if fuzz.failures else 0


@dataclass
class Failure:
    """A failure by its smallest configuration, and the number of draws that have failed in the same way.

    `reason` is the cause of a refusal; the others have none.
    """

    kind: str
    reason: str
    draw: Draw
    draws: int = 1

    def is_like(self, kind: str, reason: str, draw: Draw) -> bool:
        """Return True if a draw with a failure of this kind has all values of the smallest one."""
        values = [(name, value) for name, value in self.draw.items() if value]
        return (kind, reason) == (self.kind, self.reason) and all(draw[name] == value for name, value in values)


@dataclass
class Fuzz:
    """A run of the fuzz and its results."""

    drawing: Drawing
    oracle: Oracle
    folder: Path
    options: Options
    failures: list[Failure] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    checked: set[str] = field(default_factory=set)  # causes of refusals
    resumed: int = 0
    by_chance: int = 0

    def run(self) -> None:
        """Draw and judge until the time is over, or `count` configurations have been judged."""
        layouts = Layouts(self.folder / "layouts.csv")
        start = reported = time.monotonic()
        limit, most = 60 * self.options.minutes, self.options.count
        for draw in self.drawing:
            if (passed := time.monotonic() - start) > limit or (most and self.outcomes.total() >= most):
                break
            if time.monotonic() - reported > REPORT:
                share = max(passed / limit, self.outcomes.total() / most if most else 0.0)
                eta = format_duration(passed / share - passed)
                print(f"{self._state()}, {100 * share:.0f}%, ETA {eta}", flush=True)
                reported = time.monotonic()
            self._refusals()
            if row_name(draw) in layouts.kept:
                self.outcomes["ok before"] += 1
                continue
            draw, outcome = self._judged(draw)
            self.outcomes[outcome.kind] += 1
            layouts.add(row_name(draw), outcome)
            if outcome.ok and self.options.resume and self.outcomes.total() % self.options.resume == 0:
                outcome = self.oracle.judge_resumed(draw)
                self.resumed += 1
            if not outcome.ok:
                self._fail(draw, outcome)

    def summary(self) -> str:
        """Return the table of what was covered."""
        drawing = self.drawing
        lines = [
            self._state(),
            f"pairs of values: {len(drawing.met):,} met of {len(drawing.met) + len(drawing.missing):,}; "
            f"{len(drawing.impossible):,} others cannot be legal, or need more than {self.options.ranks} ranks",
            f"refusals: {counted(len(self.checked), 'reason')} checked",
            f"checkpoints: {counted(self.resumed, 'configuration')} resumed",
            f"chance: {counted(self.by_chance, 'configuration')} beyond a limit with one seed, but not with another",
        ]
        return "\n".join([*lines, *(f"failure-{n + 1}: {self._command(each)}" for n, each in enumerate(self.failures))])

    def _judged(self, draw: Draw) -> tuple[Draw, Judgement]:
        """Return the outcome of a draw and, if it differs from one process by chance, that with another seed instead.

        Rounding decides which side of 0 an input of ReLU is on, and between two experts with the same score: each
        changes a gradient by about a thousandth, with one seed in many. A fault is there with every seed.
        """
        outcome = self.oracle.judge(draw)
        if outcome.kind != "parity":
            return draw, outcome
        other = draw | {"seed": next(each for each in AXES["seed"].values if each != draw["seed"])}
        again = self.oracle.judge(other)
        self.by_chance += again.ok
        return (other, again) if again.ok else (draw, outcome)

    def _state(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        return f"{counted(self.outcomes.total(), 'configuration')} ({kinds or 'none'}), {len(self.failures)} failures"

    def _refusals(self) -> None:
        """Check the refusals that drawing has met."""
        for reason in [each for each in self.drawing.refused if each not in self.checked]:
            self.checked.add(reason)
            draw = self.drawing.refused[reason]
            if text := complaint(overrides(draw)):
                self._fail(draw, Judgement("refusal", text))

    def _fail(self, draw: Draw, outcome: Judgement) -> None:
        """Minimise a failure and report it, unless it is like one before."""
        reason = cause(outcome.message) if outcome.kind == "refusal" else ""
        for failure in self.failures:
            if failure.is_like(outcome.kind, reason, draw):
                failure.draws += 1
                return
        last = outcome

        def fails(smaller: Draw) -> bool:
            nonlocal last
            now = self._outcome(smaller, outcome.kind)
            same = now.kind == outcome.kind and (not reason or cause(now.message) == reason)
            last = now if same else last
            return same

        failure = Failure(outcome.kind, reason, minimised(draw, fails))
        self.failures.append(failure)
        lines = [self._command(failure), f"{failure.kind}: {last.message}"]
        lines += [f"seed: {self.options.seed}", f"drawn: {row_name(draw)}"]
        path = self.folder / f"failure-{len(self.failures)}.txt"
        write_whole(path, "\n".join(lines) + "\n")
        print(f"{path}: {lines[1]}\n  {lines[0]}", flush=True)

    def _outcome(self, draw: Draw, kind: str) -> Judgement:
        """Return the outcome of a draw by what finds this kind of failure. The draw may be refused, or have one rank
        alone, which has nothing to compare."""
        if text := complaint(overrides(draw)):
            return Judgement("refusal", text)
        if message := refusal(overrides(draw)):
            return Judgement("refused", message)
        if world(draw) == 1:
            return Judgement("ok")
        if kind == "resume":
            return self.oracle.judge_resumed(draw)
        return self.oracle.judge(draw, quick=True) if kind == "hang" else self._judged(draw)[1]

    def _command(self, failure: Failure) -> str:
        """Return the command that shows a failure."""
        command = ["gptlite", "certify"] if failure.kind == "resume" else ["gptlite", "parity", f"steps={STEPS}"]
        return shlex.join([*command, *overrides(failure.draw)])
