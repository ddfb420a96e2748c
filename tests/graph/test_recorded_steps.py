"""Steps replayed from a record: the same losses and weights as steps without, and a record that holds no host value."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from graph.tape import Tape, TapeRecorder, Uncaptured
from graph.tape import differing as differing_tapes
from marking import marked
from run_files import differing, meta, read_metrics

from gptlite.config import load
from gptlite.data.batch_loader import Batch
from gptlite.optimizer.schedule import set_lr
from gptlite.parallelism import pipeline
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.graph.steps import RECORDS, WARM_STEPS, RecordedSteps
from gptlite.satellites.parity.record import build
from gptlite.trainer.loss_scale import Decisions
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step
from gptlite.trainer.steps import Steps
from gptlite.trainer.trainer import Trainer

CPU = torch.device("cpu")
BASE = ["optimizer=adamw", "ops.adamw=fused", "optimizer.lr=0.01", "schedule=cosine"]
FP16 = ["precision=fp16", "precision.initial_scale_power=20", "precision.hysteresis=2", "precision.loss_scale_window=3"]
SMALL = ["model.kv_heads=1", "model.num_layers=2", "model.num_heads=2", "model.d_model=32"]
MODERN, EXPERTS = ["model=gpt-lite-modern", *SMALL], ["model=moe-lite", *SMALL]
STEPS = ["trainer.max_steps=12", "trainer.eval_interval=5", "checkpoint.interval=7"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """The gradient of the loss is not read ahead, which a GPU would wait for."""
    monkeypatch.setattr(pipeline, "known_upstream", lambda valid: None)


@pytest.fixture
def recorded(run: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TapeRecorder]:
    """A run whose results are read a step later, with records on tape if `records`."""

    def start(name: str, records: bool, *overrides: str) -> TapeRecorder:
        recorder = TapeRecorder()
        said: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["gptlite.pretrain"], "Trainer", partial(Trainer, lag=1))
            if records:
                patch.setattr(
                    sys.modules["gptlite.start.pretrain"],
                    "graph_steps",
                    lambda run, log: RecordedSteps(recorder, said.append),
                )
            assert run(name, *BASE, *STEPS, *overrides)[0] == 0
        assert said == []
        return recorder

    return start


def losses(folder: Path) -> list[tuple[Any, ...]]:
    keys = "step", "loss", "grad_norm", "lr", "loss_scale", "val_loss", "tokens", "batch_size"
    return [tuple(row.get(key) for key in keys) for row in read_metrics(folder)]


RUNS = {
    "bf16": ["precision=bf16"],
    "muon": [*MODERN, "optimizer=muon"],
    "fp8": [*MODERN, "precision=fp8", "precision.fp8_head=true", "trainer.eval_interval=3"],  # before the record, too
    "dropout": ["model.dropout=0.1", "data.micro_batch_size=4"],
    "fp16": FP16,
    "modern": [*MODERN, "precision=bf16", "parallelism.activation_checkpointing=full"],
    "ramp": ["data.global_batch_size=8", "data.batch_ramp=[4,2,16]", "trainer.max_steps=16"],
    "documents": ["data.packing=documents"],  # the ends of documents vary in number
    "reference": ["ops=reference", "ops.adamw=fused"],
}


@pytest.mark.parametrize("options", marked([*RUNS.values()], quick=1, slow=8), ids=RUNS)
def test_replayed_steps_are_the_same_steps(
    recorded: Callable[..., TapeRecorder], tmp_path: Path, options: list[str]
) -> None:
    recorded("plain", False, *options)
    recorder = recorded("replayed", True, *options)
    assert recorder.replays >= 3
    assert losses(tmp_path / "plain") == losses(tmp_path / "replayed")
    last = losses(tmp_path / "plain")[-1][0]
    assert differing(tmp_path / "plain", tmp_path / "replayed", last) == []
    assert meta(tmp_path / "plain", last) == meta(tmp_path / "replayed", last)
    shutil.copytree(tmp_path / "replayed", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{last:08}")
    assert recorded("resumed", True, *options).replays >= (1 if last == 12 else 0)  # those of a ramp are too short
    assert differing(tmp_path / "plain", tmp_path / "resumed", last) == []


@pytest.fixture
def built(tiny: list[str], tmp_path: Path) -> Iterator[Callable[..., tuple[TrainState, Step]]]:
    states: list[TrainState] = []

    def make(*overrides: str) -> tuple[TrainState, Step]:
        words = [*tiny, *BASE, f"run.dir={tmp_path}", "run.name=x", "precision=bf16", *overrides]
        state, step = build(load(words), Mesh(CPU))
        states.append(state)
        return state, step

    yield make
    for state in states:
        state.loader.close()


def two_tapes(state: TrainState, step: Step, change: Callable[[], None] = lambda: None) -> tuple[Tape, Tape]:
    """The tapes of two steps, with other batches, rates and step numbers, after those that create what stays."""
    recorder, kept = TapeRecorder(), list[Batch]()

    def execute(step: Callable[..., Any], state: TrainState, batches: Sequence[Batch], decisions: Decisions) -> Any:
        kept.extend(batches[len(kept) :])
        for mine, new in zip(kept, batches, strict=True):
            for name in ("tokens", "targets", "sample_ids"):
                getattr(mine, name).copy_(getattr(new, name))
        return recorder.record(lambda: step(state, kept, decisions))[0]

    for group in state.optimizer.param_groups:
        group["lr"] = torch.zeros((), dtype=torch.float64)
    steps = Steps(replace(step, execute=execute), 1)
    for _ in range(5):
        change()
        steps.begin(state)
        if steps.ready(False):
            steps.take()
    return recorder.tapes[-2], recorder.tapes[-1]


SAME_EACH_STEP = {**RUNS, "experts": EXPERTS}


@pytest.mark.parametrize("options", marked([*SAME_EACH_STEP.values()], quick=4, slow=7), ids=SAME_EACH_STEP)
def test_no_value_of_the_host_enters_a_step(built: Callable[..., tuple[TrainState, Step]], options: list[str]) -> None:
    """Two steps run the same ops on the same memory, with the same arguments."""
    first, second = two_tapes(*built(*(each for each in options if "ramp" not in each)))
    assert len(first.ops) > 100
    assert differing_tapes(first, second) == []


def test_a_rate_from_the_host_is_noticed(built: Callable[..., tuple[TrainState, Step]]) -> None:
    state, step = built()

    def as_number() -> None:
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0  # set_lr replaces it

    lines = differing_tapes(*two_tapes(state, step, as_number))
    assert any("adamw_" in line for line in lines)


def test_memory_that_a_step_replaces_is_noticed(built: Callable[..., tuple[TrainState, Step]]) -> None:
    state, step = built()

    def replaced() -> None:
        for values in state.optimizer.state.values():
            values["step"] = values["step"].clone()

    (line,) = differing_tapes(*two_tapes(state, step, replaced))
    assert line.startswith("outside: ")


def test_a_step_that_reads_a_value_runs_without_a_record(
    built: Callable[..., tuple[TrainState, Step]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, step = built()
    decide, recorder, said = Decisions.decide, TapeRecorder(), list[str]()

    def reading(self: Decisions, totals: Any) -> Any:
        totals.norm.item()
        return decide(self, totals)

    monkeypatch.setattr(Decisions, "decide", reading)
    steps = Steps(replace(step, execute=RecordedSteps(recorder, said.append)), 1)
    for _ in range(WARM_STEPS + 3):
        steps.begin(state)
        if steps.ready(False):
            steps.take()
    assert state.step == WARM_STEPS + 3
    assert recorder.replays == 0
    (line,) = said
    assert line.startswith("warning: no CUDA graph: Uncaptured: the host reads a value by aten._local_scalar_dense")
    with pytest.raises(Uncaptured):
        recorder.record(lambda: torch.ones(2).nonzero())


def test_weights_that_something_else_writes_are_recorded_again(
    built: Callable[..., tuple[TrainState, Step]],
) -> None:
    results = []
    for records in (False, True):
        state, step = built()
        recorder = TapeRecorder()
        steps = Steps(replace(step, execute=RecordedSteps(recorder, print)) if records else step, 1)
        numbers = []
        for index in range(16):
            if index == 8:
                with torch.no_grad():
                    next(state.parts[0].parameters()).mul_(0.5)
            steps.begin(state)
            if steps.ready(False):
                numbers.append(steps.take().loss)
        numbers.append(steps.take().loss)
        results.append(numbers)
        assert len(recorder.tapes) == 2 * records
    assert results[0] == results[1]


def test_the_oldest_of_many_shapes_is_dropped(built: Callable[..., tuple[TrainState, Step]]) -> None:
    state, step = built()
    recorder = TapeRecorder()
    execute = RecordedSteps(recorder, print)
    steps = Steps(replace(step, execute=execute), 1)
    schedule = state.loader.schedule
    for size in range(1, RECORDS + 2):
        state.loader.schedule = replace(schedule, global_batch_size=2 * size)
        for _ in range(WARM_STEPS + 2):
            steps.begin(state)
            steps.take()
    assert len(recorder.tapes) == RECORDS + 1
    assert len(execute._records) == RECORDS


def test_the_host_enqueues_seven_operations(
    built: Callable[..., tuple[TrainState, Step]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the replay: copies of a batch's three tensors, the rates of two groups, a copy to the host."""
    state, step = built("data.micro_batch_size=4")
    steps = Steps(replace(step, execute=RecordedSteps(TapeRecorder(), print)), 1)
    for _ in range(WARM_STEPS + 2):
        steps.begin(state)
        steps.take()
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    steps.begin(state)
    with Dispatched() as seen:
        steps.begin(state)
    assert dict(seen.ops) == {"copy_": 3, "fill_": 2, "clone": 1}


def test_the_rate_is_filled_where_it_is_a_tensor() -> None:
    rate = torch.zeros((), dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.5)
    optimizer.param_groups[0]["lr"] = rate
    set_lr(optimizer, 0.1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.1
