"""What observes a run: when it is called, and that it changes nothing."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_files import differing, meta, read_metrics

from gptlite.config import load
from gptlite.metrics.meter import Throughput
from gptlite.pretrain import pretrain
from gptlite.trainer.attached import Attached
from gptlite.trainer.observers import Observer, Unwatched
from gptlite.trainer.report import Reporter
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import StepResult
from gptlite.trainer.trainer import Trainer

HOOKS = {name for name, hook in vars(Observer).items() if callable(hook)}


class Recorder(Observer):
    """Notes each call. After step `fails_after`, it fails."""

    def __init__(self, name: str, calls: list[str], fails_after: int | None = None) -> None:
        self.name, self.calls, self.fails_after = name, calls, fails_after

    def note(self, hook: str) -> None:
        self.calls.append(f"{self.name}: {hook}")

    def before(self, state: TrainState) -> None:
        self.note(f"before {state.step + 1}")

    @contextmanager
    def during(self, state: TrainState) -> Iterator[None]:
        self.note(f"during {state.step + 1}")
        yield
        self.note(f"begun {state.step}")

    def after(self, result: StepResult) -> None:
        self.note(f"after {result.step}")

    def reads(self, state: TrainState) -> bool:
        self.note(f"reads {state.step}")
        return self.name == "b" and state.step == 2

    def settled(self, state: TrainState) -> None:
        self.note(f"settled {state.step}")
        if state.step == self.fails_after:
            raise RuntimeError("the glass is foggy")

    def ended(self, state: TrainState) -> None:
        self.note(f"ended {state.step}")

    def close(self) -> None:
        self.note("close")

    def entries(self) -> dict[str, Any]:
        self.note("entries")
        return {f"{self.name}_entry": "of a row"}

    def figures(self) -> dict[str, Any]:
        self.note("figures")
        return {f"{self.name}_figure": "of the run"}

    def closing(self) -> list[tuple[str, str]]:
        self.note("closing")
        return [(f"as {self.name} saw", "three steps")]


def observed(folder: Path, tiny: list[str], lag: int, *observers: Recorder) -> None:
    """A run of three steps."""
    config = load([*tiny, f"run.dir={folder}", "trainer.max_steps=3"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["gptlite.pretrain"], "Trainer", partial(Trainer, lag=lag))
        pretrain(config, attached=Attached(observers=lambda *_: observers))


def begun(step: int) -> list[str]:
    return [f"before {step}", f"during {step}", f"begun {step}", f"reads {step}"]


def read(step: int) -> list[str]:
    return [f"after {step}", "entries"]


END = ["settled 3", "ended 3", "close", "figures", "closing"]
# With a lag of 1, step 2 begins before the result of step 1 is read, but step 3 does not, as `reads` asks for it.
ORDER = {
    0: [*begun(1), *read(1), "settled 1", *begun(2), *read(2), "settled 2", *begun(3), *read(3), *END],
    1: [*begun(1), *begun(2), *read(1), *read(2), "settled 2", *begun(3), *read(3), *END],
}


@pytest.mark.parametrize("lag", ORDER)
def test_every_hook_is_called_in_order(tiny: list[str], tmp_path: Path, lag: int) -> None:
    calls: list[str] = []
    observed(tmp_path, tiny, lag, Recorder("a", calls), Recorder("b", calls))
    for name in ("a", "b"):
        assert [call.removeprefix(f"{name}: ") for call in calls if call.startswith(name)] == ORDER[lag]
    assert {hook.split()[0] for hook in ORDER[lag]} == HOOKS | {"begun"}
    turns = [call[0] for call in calls if "begun" not in call and "close" not in call]
    assert turns == ["a", "b"] * (len(turns) // 2)
    result, rows = json.loads((tmp_path / "result.json").read_text()), read_metrics(tmp_path)
    assert (result["a_figure"], result["b_figure"]) == ("of the run", "of the run")
    assert [row["b_entry"] for row in rows if "loss" in row] == ["of a row"] * 3
    assert "  as b saw         three steps\n" in (tmp_path / "train.log").read_text()


def test_observers_of_a_failed_run_are_closed(tiny: list[str], tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="foggy"):
        observed(tmp_path, tiny, 0, Recorder("a", calls, fails_after=2), Recorder("b", calls))
    assert calls[-5:] == ["a: settled 2", "a: close", "b: close", "a: figures", "b: figures"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["b_figure"]) == ("failed: RuntimeError: the glass is foggy", "of the run")


def test_sinks_are_closed_even_if_an_observer_cannot_be() -> None:
    class Stuck(Observer):
        def close(self) -> None:
            raise OSError("the door is stuck")

    class Sink:
        closed: bool | None = None

        def write(self, row: Mapping[str, Any]) -> None: ...

        def rewind(self, step: int) -> None: ...

        def close(self, failed: bool = False) -> None:
            self.closed = failed

    sink = Sink()
    throughput = Throughput(tokens_per_step=1, samples_per_step=1, flops_per_token=None, peak_flops=None)
    with pytest.raises(OSError, match="stuck"):
        Reporter([sink], throughput, 3, lambda _: None, observers=(Stuck(),)).close(failed=True)
    assert sink.closed is True


def test_nothing_that_observes_a_run_changes_it(tiny: list[str], run: Callable, tmp_path: Path) -> None:
    """The core alone, and a run with all that comes with gptlite."""
    options = ["trainer.profile_steps=[3,4]", "trainer.replica_check_interval=2", "model.dropout=0.1"]
    assert pretrain(load([*tiny, f"run.dir={tmp_path / 'bare'}", *options])).exit_code == 0
    assert run("observed", *options)[0] == 0
    assert (tmp_path / "observed" / "trace-steps-3-4.json").exists()
    assert not (tmp_path / "bare" / "trace-steps-3-4.json").exists()
    bare, rows = (read_metrics(tmp_path / name) for name in ("bare", "observed"))
    same = [key for row in bare for key in ("step", "loss", "val_loss", "grad_norm", "lr", "tokens") if key in row]
    assert len(same) > 40
    assert [{key: row.get(key) for key in same} for row in bare] == [
        {key: row.get(key) for key in same} for row in rows
    ]
    assert {key for row in rows for key in row} - {key for row in bare for key in row} == {
        *(f"memory_{name}_bytes" for name in ("allocated", "peak", "average")),
        *(f"memory_{name}_bytes" for name in ("parameters", "gradients", "optimizer", "activations")),
        "utilization",
        "goodput",
    }
    assert meta(tmp_path / "bare", 8) == meta(tmp_path / "observed", 8)
    assert differing(tmp_path / "bare", tmp_path / "observed", 8) == []


@pytest.mark.parametrize("fails_in", ["build", "restore", "observers", "training"])
def test_the_watch_is_closed_wherever_a_run_fails(
    tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch, fails_in: str
):
    """A process may have other runs after it, which the watch of this one would end."""
    closed = []

    class Closed(Unwatched):
        def close(self) -> None:
            closed.append(True)

    def fail(*_: object) -> Any:
        raise RuntimeError(fails_in)

    attached = Attached(watch=lambda mesh, limit: Closed())
    hook = {"restore": "recall", "observers": "observers", "training": "execute"}.get(fails_in)
    attached = replace(attached, **({hook: fail} if hook else {}))
    config = load([*tiny, f"run.dir={tmp_path / 'run'}", "trainer.max_steps=3"])
    if fails_in == "build":
        monkeypatch.setattr(sys.modules["gptlite.pretrain"], "build_run", fail)
    with pytest.raises(RuntimeError, match=fails_in):
        pretrain(config, attached=attached)
    assert closed
