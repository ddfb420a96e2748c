"""`gptlite-kernels bench`: what is timed, on which buffers, and what a row says."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from gptlite.kernels import bench, timing
from gptlite.kernels.bench import BACKWARD, BOTH, FORWARD, BenchRow, Options, directions, kernel_task, torch_task
from gptlite.kernels.case import Case, size_of
from gptlite.kernels.cases import CASES
from gptlite.kernels.check import TOLERANCES, largest_error
from gptlite.kernels.timing import EventClock, Task, measure

pytestmark = pytest.mark.usefixtures("kernels")
CPU, ROTATED = torch.device("cpu"), 20_000
BY_NAME = {case.ops[0]: case for case in CASES}
APART = [(case, direction) for case in CASES for direction in directions(case, apart=True)]


@dataclass
class Said:
    """A clock that says what it was told to, and runs the calls."""

    told: dict[str, float]  # seconds a call
    calls: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, calls: Iterable[Callable[[], Any]]) -> float:
        done = [call() for call in calls]
        self.calls[name] = len(done)
        return self.told[name] * len(done)


def rows_of(name: str, apart: bool, size: tuple[int, int] = (8, 16), **options: Any) -> tuple[list[BenchRow], Said]:
    """Of a CPU, which times as a GPU does if told to."""
    clock = Said({"ours": 2e-3, "eager": 5e-3})
    given = Options(compile=False, repeats=1, ops=name, **options)
    with mock.patch.object(bench, "ROTATED_BYTES", ROTATED):
        return list(bench.rows_of(BY_NAME[name], size, given, 1e6, clock, apart)), clock


def test_a_row_of_both_directions() -> None:
    (row,), clock = rows_of("layer_norm", apart=False)
    count = 5 * 3 * 8 * 16 * 2  # passes, the shape, bytes of bf16
    assert row == BenchRow("layer_norm", BOTH, (3, 8, 16), "bfloat16", 2e-3, count, count / 2e-3 / 1e6, {"eager": 2.5})
    assert clock.calls == {"ours": 1, "eager": 1}  # one set of buffers, as a training step has them


def test_rows_of_each_direction() -> None:
    found, clock = rows_of("layer_norm", apart=True, dtype="float32")
    each = 3 * 8 * 16 * 4
    assert [(row.direction, row.bytes) for row in found] == [(FORWARD, 2 * each), (BACKWARD, 3 * each)]
    assert [row.share_of_copy for row in found] == pytest.approx([2 * each / 2e3, 3 * each / 2e3])
    inputs = BY_NAME["layer_norm"].make(8, 16, torch.float32, CPU)
    assert clock.calls["ours"] == clock.calls["eager"] == -(-ROTATED // size_of(inputs)) > 1


def test_buffers_rotate_over_more_than_any_cache() -> None:
    assert bench.ROTATED_BYTES >= 200e6  # three times the 60 MB of an H200's


def test_an_op_without_a_backward_is_one_row() -> None:
    assert [row.direction for row in rows_of("adamw_", apart=True)[0]] == [FORWARD]
    assert [row.direction for row in rows_of("cross_entropy_", apart=True)[0]] == [BOTH]
    assert [row.direction for row in rows_of("adamw_", apart=False)[0]] == [FORWARD]


X, ROPE, LISTS = 3 * 5 * 8, 2 * 5 * 3 * 4 * 8, 5 * 8 + 8 + 1 + 7 * 5
TRAFFIC = {  # in bytes, at [5, 8] in bf16
    "masked_softmax": (2 * 2 * 8 * 5 * 8 + 2 * 5 * 8, 2 * 3 * 8 * 5 * 8),
    "causal_softmax": (2 * 1.5 * 8 * 5 * 8, 2 * 2 * 8 * 5 * 8),  # hidden scores are not read
    "layer_norm": (2 * 2 * X, 2 * 3 * X),
    "residual_norm": (2 * 4 * X, 2 * 4 * X),
    **dict.fromkeys(("layer_norm rms", "layer_norm rms without gain"), (2 * 2 * X, 2 * 3 * X)),
    **dict.fromkeys(("residual_norm rms", "residual_norm rms without gain"), (2 * 4 * X, 2 * 4 * X)),
    **{f"bias_activation {kind}": (2 * 2 * X, 2 * 3 * X) for kind in ("gelu_tanh", "gelu_erf", "relu", "relu2")},
    **{f"bias_activation {kind}": (2 * 1.5 * X, 2 * 2.5 * X) for kind in ("swiglu", "geglu")},
    "rope": (2 * 2 * ROPE, 2 * 2 * ROPE),
    "rope qk_norm": (2 * 2 * ROPE, 2 * 3 * ROPE),
    "join_heads": (2 * 6 * 2 * 5 * 6 * 8,),
    "add_token_rows_": (2 * 5 * 8 + 8 * 3 * 8,),  # 5 rows of 3 tokens
    "residual_norm_amax": (2 * 4 * X, 2 * 4 * X),
    "bias_activation_amax gelu_tanh": (2 * 2 * X, 2 * 3 * X),
    "dropout": (2 * 2 * X,),
    "cross_entropy_": (2 * 2 * 5 * 8,),
    "cross_entropy_ plain": (2 * 2 * 5 * 8,),
    "cross_entropy_stats": (2 * 5 * 8, 2 * 2 * 5 * 8),
    "norm": (2 * LISTS,),
    "adamw_": ((2 + 6 * 4) * LISTS,),
    "quantize_blocks int8": (2 * (1024 + 260),),  # one block of fp32, and its message
    "quantize_blocks int4": (2 * (1024 + 132),),
    "quantize_blocks sign": (2 * (4096 + 132),),
    "quantize_fp8": (4 * 5 * 8,),
    "quantize_fp8 one layout": (3 * 5 * 8,),
    "attention": (2 * 4 * 2 * 5 * 4 * 8, 2 * 8 * 2 * 5 * 4 * 8),
    "attention_packed": (2 * 4 * 2 * 5 * 4 * 8, 2 * 8 * 2 * 5 * 4 * 8),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ops[0])
def test_bytes_that_must_travel(case: Case) -> None:
    assert case.traffic(case.make(5, 8, torch.bfloat16, CPU)) == pytest.approx(TRAFFIC[case.ops[0]])
    assert len(TRAFFIC[case.ops[0]]) == (1 if case.kernel_backward is None else 2)


@pytest.mark.parametrize(("case", "direction"), APART, ids=lambda each: getattr(each, "ops", (each,))[0])
def test_what_is_timed_is_the_op(case: Case, direction: str) -> None:
    """Ours and torch's, each direction alone: their results are those of the whole."""
    torch.manual_seed(0)
    inputs = case.make(5, 8, torch.float32, CPU)
    theirs = torch_task(case.forward, case.leaves, direction)
    expected = theirs.call(theirs.before(inputs))
    ours = kernel_task(case, direction)
    found = ours.call(ours.before(inputs))
    if direction == BOTH:
        found, expected = sum(found, ()), sum(expected, ())
    if direction == FORWARD:
        found = case.between(inputs, found)[: case.compared]
    expected = tuple(each.double() for each in expected)
    assert largest_error(found, expected) <= TOLERANCES[torch.float32]


def test_rounds_visit_every_set_and_the_median_counts() -> None:
    told = iter([9.0, 9.0, 9.0, 3.0, 100.0, 6.0])  # the first three warm up

    def clock(name: str, calls: Iterable[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        return next(told)

    seen: list[str] = []
    task = Task(seen.append, before=lambda buffers: f"{buffers}, made ready")
    assert measure({"it": task}, ["a", "b", "c"], 3, clock) == {"it": 6.0 / 3}
    assert seen == ["a, made ready", "b, made ready", "c, made ready"] * 6


def test_on_a_gpu_time_is_between_events_and_the_stream_is_busy_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("event")

        def synchronize(self) -> None:
            said.append("wait")

        def elapsed_time(self, end: object) -> float:
            return 7.0  # ms

    host = iter([0.0, 0.004, 10.0, 10.0001])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles), raising=False)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(host))
    clock = EventClock()
    calls = [lambda: said.append("call")] * 2
    assert clock("ours", calls) == pytest.approx(7e-3)
    assert said == ["idle", 0, "event", "call", "call", "event", "wait"]
    said.clear()
    clock("ours", calls)
    assert said[1] == int(1.5 * 0.004 * timing.SPIN_HZ)  # as long as the host took to issue them, and half as much


def test_a_library_that_fails_is_left_out_and_ours_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such GPU\nat all")

    tasks = {"ours": Task(lambda _: None), "Liger": Task(fail)}
    assert list(bench._working(tasks, {})) == ["ours"]
    assert capsys.readouterr().out == "Liger left out: RuntimeError: no such GPU\n"
    with pytest.raises(RuntimeError, match="no such GPU"):
        bench._working({"ours": Task(fail)}, {})


@pytest.mark.slow
def test_rows_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "COPY_BYTES", {"cpu": 2**20})
    found = list(bench.rows(Options(ops="layer_norm,norm", repeats=1)))
    assert [(row.op, row.shape) for row in found] == [
        *(("layer_norm", (3, *size)) for size in BY_NAME["layer_norm"].sizes),
        *(("norm", size) for size in BY_NAME["norm"].sizes),
    ]
    assert all(row.seconds > 0 and row.share_of_copy > 0 for row in found)
    assert all({"eager", "compiled"} == set(row.ratios) for row in found if row.op == "layer_norm")
