"""The account of a run's time: exact with clocks of the test, and beside measured times in a real run."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_files import read_metrics

from gptlite.config import load
from gptlite.metrics.meter import Throughput
from gptlite.satellites.elastic.goodput import CAUSES, FILE, Account, Goodput, planned_words, read_account, words
from gptlite.satellites.plan.interval import Failures
from gptlite.start.pretrain import pretrain
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.report import Reporter
from gptlite.trainer.steps import Steps
from gptlite.trainer.trainer import Trainer


class Clock:
    """Monotonic time, from which the time of day differs by a fixed number."""

    def __init__(self, folder: Path) -> None:
        self.time, self.folder = 1000.0, folder

    def process(self, step: int, resumed: bool, elastic: bool = False, last: int = 100) -> "Process":
        return Process(self, step, resumed, elastic, last)


class Process:
    """Process of a run after `step` steps, whose command has begun now."""

    def __init__(self, clock: Clock, step: int, resumed: bool, elastic: bool, last: int) -> None:
        self.clock, self.step, self.began = clock, step, clock.time
        self.throughput = Throughput(
            tokens_per_step=1, samples_per_step=1, flops_per_token=None, peak_flops=None, clock=lambda: clock.time
        )
        self.folder: Any = SimpleNamespace(
            path=clock.folder,
            resume_from=clock.folder / "checkpoints" / "step-00000001" if resumed else None,
            mesh=SimpleNamespace(is_main=True),
            config=SimpleNamespace(
                parallelism=SimpleNamespace(elastic=elastic), trainer=SimpleNamespace(last_step=last)
            ),
        )
        self.goodput: Any = None

    def builds(self, seconds: float) -> None:
        self.clock.time += seconds
        clocks = (lambda: self.clock.time, lambda: self.clock.time + 7e8)
        self.goodput = Goodput(self.folder, self.throughput, self.began, clocks)

    def takes(self, *seconds: float) -> None:
        for duration in seconds:
            self.goodput.before(SimpleNamespace(step=self.step))
            self.clock.time += duration
            self.step += 1
            self.goodput.after(SimpleNamespace(step=self.step))

    def spends(self, cause: str, seconds: float) -> None:
        with self.throughput.excluded(cause):
            self.clock.time += seconds

    def ends(self) -> None:
        self.goodput.ended(SimpleNamespace(clock=self.step))
        self.goodput.close()

    @property
    def seconds(self) -> dict[str, float]:
        return {cause: seconds for cause, seconds in self.goodput.account.seconds.items() if seconds}


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


def test_every_second_has_one_cause(clock: Clock) -> None:
    process = clock.process(0, resumed=False)
    process.builds(10)
    process.spends("other", 1)  # such as the set-up of a measurement
    process.takes(8, 2, 2)  # 6 of the first step are compilation
    process.clock.time += 0.5  # a row
    process.spends("evaluation", 4)
    process.spends("checkpoints", 3)
    process.takes(2)
    process.goodput.ended(SimpleNamespace(clock=100))
    process.spends("evaluation", 4)
    process.spends("checkpoints", 3)
    process.clock.time += 0.25  # waits for the save
    process.goodput.close()
    expected = {"start": 16, "steps": 8, "evaluation": 8, "checkpoints": 6.25, "other": 1.5}
    assert process.seconds == expected
    assert sum(expected.values()) == clock.time - process.began
    account = read_account(clock.folder)
    assert (account.new_steps, account.highest, account.saves, account.restarts, account.ended) == (4, 4, 2, 0, "done")
    figures = process.goodput.figures()
    assert figures["goodput"] == 8 / 39.75
    assert figures["goodput_causes"].keys() == set(CAUSES)
    assert figures["goodput"] + sum(figures["goodput_causes"].values()) == pytest.approx(1, abs=1e-12)
    assert process.goodput.entries() == {"goodput": round(8 / 39.75, 6)}


def test_steps_that_overlap_count_once(clock: Clock) -> None:
    """With a lag of 1, as on a GPU: a step begins before the result of the last one is read."""
    process = clock.process(0, resumed=False)
    process.builds(10)
    goodput = process.goodput
    goodput.before(SimpleNamespace(step=0))
    clock.time += 5  # begins the first, with compilation
    goodput.before(SimpleNamespace(step=1))
    clock.time += 1
    goodput.after(SimpleNamespace(step=1))
    for step in (2, 3):
        clock.time += 1
        goodput.before(SimpleNamespace(step=step))
        clock.time += 1
        goodput.after(SimpleNamespace(step=step))
    clock.time += 2
    goodput.after(SimpleNamespace(step=4))
    goodput.ended(SimpleNamespace(clock=100))
    assert process.seconds == {"start": 10 + 6 - 2, "steps": 2 + 4 + 2}


def test_a_loss_counts_until_the_first_new_step(clock: Clock) -> None:
    process = clock.process(0, resumed=False)
    process.builds(10)
    process.takes(*[2] * 10)  # the account is written after each, as they take longer than WRITE_SECONDS
    process.goodput.before(SimpleNamespace(step=10))
    clock.time += 1.5  # killed in a step
    assert json.loads((clock.folder / FILE).read_text())["highest"] == 10
    clock.time += 20  # until it is noticed
    process = clock.process(6, resumed=True)
    process.builds(5)
    process.takes(9, 2, 2, 2, 2)  # the first 4 have been taken before; 7 of the first is compilation
    assert process.seconds == {"start": 10, "steps": 22, "repeated steps": 8, "restarts": 1.5 + 20 + 5 + 7}
    assert (process.goodput.account.restarts, process.goodput.account.new_steps) == (1, 11)
    clock.time += 3  # fails in order: the exception reaches `close`
    process.goodput.close()
    clock.time += 4
    process = clock.process(11, resumed=True)
    process.began = 1000.0  # of the launcher, which starts each process
    process.builds(1)
    process.takes(2, 2)
    assert process.seconds == {"start": 10, "steps": 26, "repeated steps": 8, "restarts": 33.5 + 3 + 4 + 1}
    assert sum(process.seconds.values()) == clock.time - 1000


@pytest.mark.parametrize(("elastic", "last", "pause", "cause"), [
    (False, 100, 50, None), (True, 100, 50, "restarts"), (True, 2, 50, None), (True, 100, 5000, None)
])  # fmt: skip
def test_a_pause_after_an_orderly_end_is_left_out(
    clock: Clock, elastic: bool, last: int, pause: float, cause: str | None
) -> None:
    """A signal to an elastic run is a change of its world, if the run goes on soon."""
    process = clock.process(0, False, elastic, last)
    process.builds(10)
    process.takes(2, 2)
    process.ends()
    clock.time += pause
    process = clock.process(2, True, elastic, last)
    process.builds(10)
    process.takes(3, 2)
    restarted = {cause: pause + 10 + 1} if cause else {}
    assert process.seconds == {"start": 10 + (0 if cause else 11), "steps": 8, **restarted}
    assert process.goodput.account.restarts == len(restarted)


def test_another_runs_checkpoint_and_a_damaged_account_begin_anew(clock: Clock, tmp_path: Path) -> None:
    (clock.folder / FILE).write_text('{"seconds": ')
    assert read_account(clock.folder) == Account()
    (clock.folder / FILE).write_text(json.dumps({"seconds": {"steps": 5.0}, "until": 1.0, "surprise": 1}))
    assert read_account(clock.folder) == Account()
    (clock.folder / FILE).write_text(json.dumps({"seconds": {"steps": 5.0}, "until": 1.0}))
    process = clock.process(2, resumed=True)
    process.folder.resume_from = tmp_path.parent / "other" / "checkpoints" / "step-00000002"
    process.builds(10)
    assert process.goodput.account == Account()


def test_the_line_adds_up() -> None:
    shares = {"steps": 0.98666, "restarts": 0.00555, "checkpoints": 0.00333, "repeated steps": 0.00133}
    shares["evaluation"] = 1 - sum(shares.values())
    text = words(shares)
    assert text == "98.7%: restarts 0.6%, checkpoints 0.3%, repeated steps 0.1%, evaluation 0.3%"
    for parts in (7, 13, 29):
        line = words({"steps": 1 / parts} | dict.fromkeys(CAUSES, (1 - 1 / parts) / 6))
        assert sum(float(each.split()[-1].rstrip("%:")) for each in line.replace(":", ",").split(",")) == pytest.approx(
            100
        )
    assert words(dict.fromkeys(("steps", *CAUSES), 0.0)) == "0.0%"


def test_the_prediction_is_beside_the_measurement_after_losses() -> None:
    seconds = {"steps": 9000.0, "restarts": 100.0, "checkpoints": 300.0, "repeated steps": 600.0, "evaluation": 999.0}
    account = Account(seconds, new_steps=9000, saves=30, restarts=5)
    config = load(["data=synthetic", "checkpoint.interval=300"])
    failures = Failures(mtbf=1980, save=10, restart=20)
    predicted, best = failures.goodput(300, False), failures.goodput(failures.best_steps(1.0), False)
    assert 0.88 < predicted < best < 0.91
    assert planned_words(account, config) == (
        f"of steps, saves and restarts: 90.0%, planned {predicted:.1%} with checkpoint.interval=300 and a loss every "
        f"33m00s of them; best checkpoint.interval={failures.best_steps(1.0)}: {best:.1%}"
    )
    hours = load(["data=synthetic", "checkpoint.interval=300", "cluster.mtbf_hours=10", "cluster.nodes=18"])
    assert "a loss every 33m20s" in planned_words(account, hours)
    assert planned_words(Account(seconds, new_steps=9000, saves=30), config) == ""


@contextmanager
def timed(clock: Counter[str], cause: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    clock[cause] += time.perf_counter() - begun  # type: ignore[assignment]


def test_a_real_run_with_a_restart(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails after step 5, is started again a second later, and goes on from step 3."""
    spent, fails, taken = Counter[str](), [5], [list[float]()]
    trainer: Any = sys.modules["gptlite.trainer.trainer"]
    advance, report, save, evaluate = Trainer._advance, Reporter.step, RunFolder.save, trainer.evaluate_sets
    begin, rows = Steps.begin, list[float]()

    def advanced(self: Trainer, begins: bool) -> Any:
        if self._state.step in fails:
            raise RuntimeError("the node is gone")
        other, step = self._reporter.throughput.spent, Counter[str]()
        measuring = other["other"]
        with timed(step, "step"):
            spike = advance(self, begins)
        if begins:
            taken[-1].append(step["step"] - rows.pop() - (other["other"] - measuring))
        return spike

    def begun(*args: Any) -> None:
        time.sleep(0.1)
        begin(*args)

    def reported(*args: Any) -> None:
        step = Counter[str]()
        with timed(step, "row"):
            report(*args)
        rows.append(step["row"])

    def saved(self: RunFolder, state: Any) -> Path:
        with timed(spent, "checkpoints"):
            time.sleep(0.2)
            return save(self, state)

    def evaluated(*args: Any) -> Any:
        with timed(spent, "evaluation"):
            time.sleep(0.3)
            return evaluate(*args)

    monkeypatch.setattr(Trainer, "_advance", advanced)
    monkeypatch.setattr(Reporter, "step", reported)
    monkeypatch.setattr(Steps, "begin", begun)
    monkeypatch.setattr(RunFolder, "save", saved)
    monkeypatch.setattr(trainer, "evaluate_sets", evaluated)
    config = load([*tiny, f"run.dir={tmp_path / 'a'}", "checkpoint.interval=3", "trainer.eval_interval=4"])
    started = time.time()
    with pytest.raises(RuntimeError, match="gone"):
        pretrain(config)
    lost = time.time()
    time.sleep(1)
    fails.clear()
    taken.append([])
    assert pretrain(config).exit_code == 0
    account = read_account(tmp_path / "a")
    wall = account.until - started  # the table of results and the sample follow
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (account.restarts, account.highest, account.new_steps, account.saves) == (1, 8, 8, 3)
    for steps in taken:  # what the first one takes longer is of the start
        steps[0] = min(steps[:2])
    expected = {"steps": sum(taken[0]) + sum(taken[1][2:]), "repeated steps": sum(taken[1][:2]), **spent}
    for cause in ("steps", "repeated steps", "checkpoints", "evaluation"):
        assert account.seconds[cause] == pytest.approx(expected[cause], abs=0.15), cause
    assert 1 < account.seconds["restarts"] < wall - (lost - started)
    total = sum(account.seconds.values())
    assert total == pytest.approx(wall, abs=0.05)
    assert result["goodput"] == pytest.approx(account.seconds["steps"] / total)
    assert result["goodput"] + sum(result["goodput_causes"].values()) == pytest.approx(1)
    shares = [row["goodput"] for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert len(shares) == 8
    assert all(0 <= share < 1 for share in shares)
    log = (tmp_path / "a" / "train.log").read_text()
    assert all(part in log for part in ("  goodput  ", "repeated steps", "planned"))
