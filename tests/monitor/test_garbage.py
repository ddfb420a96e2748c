"""Python's garbage collector in a run: it does not run in steps, and is afterwards as it was."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gptlite import pretrain
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.satellites.monitor.garbage import GarbageCollection
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector as Python starts it, not as the tests set it; afterwards as they do."""
    enabled, threshold, frozen = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()
    if frozen:
        gc.freeze()


def at(step: int) -> TrainState:
    return cast(TrainState, SimpleNamespace(step=step))


@pytest.fixture
def collections() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(f"generation {info['generation']}")

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def garbage(count: int = 5000) -> None:
    """Objects that refer to themselves: more than an automatic collection waits for."""
    for _ in range(count):
        ring: list[Any] = []
        ring.append(ring)


def test_collections_are_before_the_first_steps_and_at_the_interval(collector: None, collections: list[str]) -> None:
    gc.enable()
    observer, when = GarbageCollection(3), []
    for step in range(10):
        before = len(collections)
        observer.before(at(step))
        when += [step] * (len(collections) - before)
        garbage()
        assert len(collections) == len(when)
    assert when == [0, 1, 3, 6, 9]
    assert set(collections) == {"generation 2"}
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    observer.close()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_memory_is_bounded_by_the_garbage_of_an_interval(collector: None) -> None:
    observer, alive = GarbageCollection(5), []
    for step in range(40):
        observer.before(at(step))
        garbage(100)
        alive.append(len(gc.get_objects()))
    observer.close()
    assert max(alive[20:]) <= max(alive[5:20]) + 50
    assert max(alive[5:]) <= min(alive[5:]) + 550


@pytest.mark.parametrize("enabled", [True, False])
def test_the_state_of_before_is_restored(collector: None, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    gc.freeze()  # as the caller has chosen
    frozen = gc.get_freeze_count()
    observer = GarbageCollection(2)
    for step in range(4):
        observer.before(at(step))
    assert not gc.isenabled()
    for _ in range(2):
        observer.close()
        assert gc.isenabled() == enabled
        assert abs(gc.get_freeze_count() - frozen) < 100  # some of them are freed


def test_an_interval_of_0_changes_nothing(collector: None, collections: list[str]) -> None:
    gc.enable()
    observer = GarbageCollection(0)
    collections.clear()
    observer.before(at(0))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    observer.close()
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_collects_between_its_steps_alone(
    tiny: list[str],
    tmp_path: Path,
    collector: None,
    collections: list[str],
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    gc.enable()
    begin, within = Step.begin, []

    def watched(self: Step, *args: Any, **options: Any) -> Any:
        before = len(collections)
        garbage()
        begun = begin(self, *args, **options)
        within.append(len(collections) - before)
        if fails and len(within) == 3:
            raise RuntimeError("the glass is foggy")
        return begun

    monkeypatch.setattr(Step, "begin", watched)
    config = load([*tiny, f"run.dir={tmp_path}", "trainer.max_steps=4", "trainer.gc_freq=2"])
    if fails:
        with pytest.raises(RuntimeError, match="foggy"):
            pretrain(config)
    else:
        pretrain(config)
    assert within == [0] * (3 if fails else 4)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.gc_freq=-1 must not be negative; 0 turns it off"):
        load(["trainer.gc_freq=-1"])
