"""Steps decided on the device and acted on a step later, as on a GPU: forced on a CPU, they change nothing."""

import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Watching
from marking import marked
from run_files import differing, meta, read_metrics
from torch import nn

from gptlite.config import load
from gptlite.data.loader import Batch, Loader
from gptlite.models.gpt.model import GPT
from gptlite.models.parallelize import copy_weights
from gptlite.ops.matrices import Matrices
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamConfig, AdamWConfig, MuonConfig, SGDConfig
from gptlite.optimizer.fused import clip_and_step, decides_on_device, is_fused
from gptlite.optimizer.rounded import RoundedOptimizer
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy
from gptlite.satellites.optimizers.configs import LambConfig, LionConfig
from gptlite.satellites.parity.record import build
from gptlite.trainer.loss_scale import Decisions, LossScaler
from gptlite.trainer.report import Reporter
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Diverged
from gptlite.trainer.steps import Steps, lag_of
from gptlite.trainer.trainer import Trainer

CPU = torch.device("cpu")
SPIKE = [
    "trainer.max_steps=16", "checkpoint.interval=5", "trainer.spike.policy=skip", "trainer.spike.window=8",
    "trainer.spike.patience=2", "trainer.spike.threshold=2", "trainer.spike.rise=0.5", "optimizer.lr=0.01",
]  # fmt: skip
FP16 = [
    "precision=fp16", "precision.initial_scale_power=20", "precision.hysteresis=2", "precision.loss_scale_window=3",
]  # fmt: skip
LONG = ["trainer.max_steps=8", "trainer.eval_interval=3", "checkpoint.interval=4", "optimizer.lr=0.01"]


@pytest.fixture
def late(run: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`run`, with a lag."""

    def start(lag: int, name: str, *overrides: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["gptlite.pretrain"], "Trainer", partial(Trainer, lag=lag))
            return run(name, *overrides)[0]

    return start


UNLIKE = ("time", "goodput", "tokens_per_second", "samples_per_second", "step_seconds", "mfu",
          "memory_allocated_bytes", "memory_peak_bytes", "memory_average_bytes", "memory_activations_bytes",
          "utilization")  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics rows but for times, the process's memory, and the byte of a flag among the activations."""
    return [{key: value for key, value in row.items() if key not in UNLIKE} for row in read_metrics(folder)]


def assert_alike(one: Path, other: Path) -> None:
    """Two runs' rows, and their checkpoints to the bit."""
    assert [json.dumps(row) for row in rows(one)] == [json.dumps(row) for row in rows(other)]
    names = [sorted(path.name for path in (each / "checkpoints").glob("step-*")) for each in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        step = int(name.removeprefix("step-"))
        assert meta(one, step) == meta(other, step)
        assert differing(one, other, step) == []


def said(folder: Path, words: str) -> list[str]:
    return [line for line in (folder / "train.log").read_text().splitlines() if words in line]


STEPPED = {
    "kernel": ["model.dropout=0.1"],
    "fp16": FP16,
    "torch": ["ops.adamw=reference", "trainer.log_interval=4"],
    "adam": ["optimizer=adam"],
    "sgd": ["optimizer=sgd"],  # the host decides, and so a lag makes no difference
}


@pytest.mark.parametrize("options", marked([*STEPPED.values()], quick=2, slow=3), ids=STEPPED)
def test_steps_are_the_same_steps(late: Callable[..., int], tmp_path: Path, options: list[str]) -> None:
    run = [*LONG, *options]
    assert late(0, "now", *run) == 0
    assert late(1, "late", *run) == 0
    assert_alike(tmp_path / "now", tmp_path / "late")
    if options is FP16:
        assert said(tmp_path / "late", "is skipped") == said(tmp_path / "now", "is skipped") != []
    shutil.copytree(tmp_path / "late", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000008")
    assert late(1, "parts", *run) == 0
    assert said(tmp_path / "parts", "resuming from")
    assert meta(tmp_path / "parts", 8) == meta(tmp_path / "now", 8)
    assert differing(tmp_path / "parts", tmp_path / "now", 8) == []


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples whose loss is infinite; those from the last on, where it is negative, have random targets."""
    numbers: list[int] = []
    forward, batch = GPT.forward, Loader.batch

    def poisoned(self: GPT, x: Any, targets: Any, sample_ids: Any = None, **more: Any) -> Any:
        out = forward(self, x, targets, sample_ids, **more)
        found = sample_ids is not None and any((sample_ids == number).any() for number in numbers)
        return out * math.inf if found else out

    def noisy(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = batch(self, consumed_samples, micro_index)
        for row, number in enumerate(given.sample_ids.tolist()):
            if -number in numbers:
                generator = torch.Generator().manual_seed(number)
                given.targets[row] = torch.randint(128, 256, given.targets[row].shape, generator=generator)
        return given

    monkeypatch.setattr(GPT, "forward", poisoned)
    monkeypatch.setattr(Loader, "batch", noisy)
    return numbers


@pytest.mark.parametrize("at", [6, 10, 14, 18], ids=["row", "evaluation", "checkpoint", "after it"])
def test_a_run_that_diverges_names_the_step(
    late: Callable[..., int], tmp_path: Path, poison: list[int], at: int
) -> None:
    poison.append(at)
    for lag, name in enumerate(("now", "late")):
        assert late(lag, name, *LONG) == 1
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("now", "late")]
    assert results[1]["status"].startswith(f"diverged: step {at // 4 + 1}: loss inf")
    for key in ("status", "step", "tokens", "best_val_loss", "loss"):
        assert results[0][key] == results[1][key]
    assert_alike(tmp_path / "now", tmp_path / "late")


@pytest.mark.parametrize("more", [[], ["ops.adamw=reference"]], ids=["kernel", "torch"])
def test_a_step_that_diverges_and_those_after_it_change_nothing(
    tiny: list[str], tmp_path: Path, poison: list[int], more: list[str]
) -> None:
    config = load([*tiny, *more, f"run.dir={tmp_path}", "run.name=x"])
    good, take_step = build(config, Mesh(CPU))
    with closing(good.loader):
        for _ in range(3):
            take_step(good)
    poison.append(13)  # in step 4
    state, take_step = build(config, Mesh(CPU))
    steps = Steps(take_step, lag=4)
    with closing(state.loader):
        for _ in range(6):
            steps.begin(state)
        assert [steps.take().step for _ in range(3)] == [1, 2, 3]
        with pytest.raises(Diverged, match=r"^step 4: loss inf, gradient norm nan$"):
            steps.take()
    assert not steps.waiting
    assert state.progress == good.progress
    after, before = state.tensors(), good.tensors()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_what_is_halted_goes_on_after_a_rewind(tiny: list[str], tmp_path: Path, poison: list[int]) -> None:
    config = load([*tiny, f"run.dir={tmp_path}", "run.name=x"])
    state, take_step = build(config, Mesh(CPU))
    steps = Steps(take_step, lag=1)
    poison.append(1)
    with closing(state.loader):
        steps.begin(state)
        with pytest.raises(Diverged):
            steps.take()
        poison.clear()
        before = [p.detach().clone() for p in state.weights()]
        steps.begin(state)
        assert steps.take().step == 1
    assert not all(torch.equal(a, b) for a, b in zip(before, state.weights(), strict=True))


@pytest.mark.parametrize(
    ("numbers", "more"),
    [
        pytest.param([14], ["trainer.max_steps=6", "checkpoint.interval=2"], id="infinite"),
        pytest.param([-number for number in range(48, 56)], [], id="high", marks=pytest.mark.slow),
    ],
)
def test_a_spike_is_left_out_alike(
    late: Callable[..., int], tmp_path: Path, poison: list[int], numbers: list[int], more: list[str]
) -> None:
    poison[:] = numbers
    for lag, name in enumerate(("now", "late")):
        assert late(lag, name, *SPIKE, *more) == 0
    assert_alike(tmp_path / "now", tmp_path / "late")
    assert said(tmp_path / "late", "spike at step") == said(tmp_path / "now", "spike at step") != []


def test_a_scale_that_goes_no_lower_ends_both(late: Callable[..., int], tmp_path: Path) -> None:
    least = ["precision=fp16", "precision.loss_scale=4294967296"]
    for lag, name in enumerate(("now", "late")):
        assert late(lag, name, *least) == 1
    statuses = [json.loads((tmp_path / name / "result.json").read_text())["status"] for name in ("now", "late")]
    assert statuses[0] == statuses[1]
    assert "at loss scale 4.29497e+09, which cannot be reduced further" in statuses[0]


@pytest.mark.parametrize("scaler", [
    LossScaler(2.0**10, 4, 1, 2.0**-3, 2.0), LossScaler(1000.0, 3, 2, 1.0, 1.7), LossScaler(96.0, 3, 2, 96.0, 1.0),
    LossScaler(2.0**10, 2, 1, 1.0, 2.0, deepspeed=True),
])  # fmt: skip
def test_the_rule_on_the_device_is_the_hosts(scaler: LossScaler) -> None:
    draw, values, met = random.Random(0), scaler.on_device(CPU), set()
    host, mirror = replace(scaler), replace(scaler)
    for _ in range(300):
        overflow = draw.random() < 0.4
        was = host.exhausted
        values, exhausted = mirror.advanced(values, torch.tensor(overflow))
        host.update(overflow)
        mirror.take(values.tolist())
        met.add((bool(exhausted), overflow))
        assert bool(exhausted) == was
        assert mirror == host
    assert len(met) == 4


def test_a_signal_saves_the_step_that_was_begun(
    late: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert late(0, "whole", *LONG, "trainer.max_steps=6", "checkpoint.interval=5") == 0
    real, handlers = Reporter.step, {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def step(self: Reporter, state: TrainState, result: Any, *more: Any) -> None:
        real(self, state, result, *more)
        if result.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "step", step)
    for lag, name in enumerate(("now", "late")):
        try:
            assert late(lag, name, *LONG) == 128 + signal.SIGTERM
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
        assert json.loads((tmp_path / name / "result.json").read_text())["step"] == 5 + lag
        assert [row["step"] for row in rows(tmp_path / name) if "loss" in row] == list(range(1, 6 + lag))
        ours, its = (meta(tmp_path / each, 5 + lag) for each in (name, "whole"))
        assert ours["consumed_samples"] == its["consumed_samples"]
        assert differing(tmp_path / name, tmp_path / "whole", 5 + lag) == []


def test_the_end_of_the_time_and_a_failing_save_end_the_run(
    late: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert late(1, "time", "trainer.max_steps=1000000", "trainer.max_time=0.001", "trainer.log_interval=1000") == 0
    result = json.loads((tmp_path / "time" / "result.json").read_text())
    assert result["status"] == "stopped: trainer.max_time"
    assert result["checkpoint"].endswith(f"step-{result['step']:08d}")
    real = os.fsync

    def full(descriptor: int) -> None:
        if "/.tmp-step-00000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    many = ("checkpoint.interval=2", "trainer.max_steps=100000", "checkpoint.async_save=true")
    assert late(1, "disk", *many) == 1
    assert json.loads((tmp_path / "disk" / "result.json").read_text())["status"].startswith("failed: ")


KINDS = AdamWConfig, AdamConfig, SGDConfig, LionConfig, LambConfig, MuonConfig
DECIDES = {kind: kind in KINDS[:2] for kind in KINDS[:-1]}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("config", DECIDES)
def test_which_optimizers_decide_on_the_device(kernels: None, config: type, fused: bool) -> None:
    named = [("a.weight", nn.Parameter(torch.ones(4, 4))), ("a.bias", nn.Parameter(torch.ones(4)))]
    optimizer = build_optimizer(config(), named, Matrices(fused={"attn.qkv.weight": (1, (1, 1, 1))}), fused)
    assert decides_on_device(optimizer, CPU) is DECIDES[config]
    assert lag_of(optimizer, CPU) == 0
    assert lag_of(optimizer, CPU, 1) == int(DECIDES[config])
    assert not decides_on_device(optimizer, torch.device("cuda"))  # offloaded: its parameters are on the host
    if not DECIDES[config]:
        return
    in_pieces = RoundedOptimizer(build_optimizer(config(), named, fused_adam=fused), 0)
    assert not decides_on_device(in_pieces, CPU)
    assert is_fused(in_pieces) is is_fused(optimizer) is fused
    for _, parameter in named:
        parameter.grad = torch.full_like(parameter, math.nan)
    before = [parameter.detach().clone() for _, parameter in named]
    for found in (1.0, 0.0):
        norm = torch.tensor(math.nan if found else 0.5)
        clip_and_step(optimizer, [p for _, p in named], 1.0, norm, 1.0, torch.tensor(found))
        assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True)) is bool(found)
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_muon_skips_a_step_on_the_device(kernels: None) -> None:
    """Momenta too, to the bit. A step that is not skipped differs from the host's by the rounding of the rate."""
    generator, results = torch.Generator().manual_seed(0), []
    start = [torch.randn(8, 6, generator=generator), torch.randn(6, generator=generator)]
    gradients = [[torch.randn(each.shape, generator=generator) for each in start] for _ in range(3)]
    for on_device in (False, True):
        named = [(name, nn.Parameter(each.clone())) for name, each in zip(("a.weight", "a.bias"), start, strict=True)]
        optimizer = build_optimizer(MuonConfig(weight_decay=0.1), named, Matrices(), True)
        assert decides_on_device(optimizer, CPU)
        assert not decides_on_device(build_optimizer(MuonConfig(), named, Matrices(), False), CPU)
        parameters = [parameter for _, parameter in named]
        for step, values in enumerate(gradients):
            for found in (0.0, 1.0) if on_device and step == 2 else (0.0,):
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.grad = torch.full_like(value, math.nan) if found else value.clone()
                before = [each.clone() for each in tensors_of(optimizer)]
                clip_and_step(optimizer, parameters, 1.0, torch.tensor(math.nan if found else 2.0), 1.0,
                              torch.tensor(found) if on_device else None)  # fmt: skip
                after = tensors_of(optimizer)
                same = [torch.equal(a, b) for a, b in zip(before, after[: len(before)], strict=True)]
                assert all(same) if found else not any(same[:2])
        results.append([each.clone() for each in tensors_of(optimizer)])
    for host, device in zip(*results, strict=True):
        torch.testing.assert_close(device, host, rtol=1e-6, atol=1e-7)


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    """Parameters, then the state of each."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [state[key] for parameter in parameters if (state := optimizer.state.get(parameter)) for key in state]
    return [*(parameter.detach() for parameter in parameters), *states]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_nothing_is_read_in_a_step(tiny: list[str], tmp_path: Path, scaled: bool) -> None:
    """On meta tensors, which have no values: what the host reads raises, and all it sends are the batches."""
    config = load(
        [*tiny, f"run.dir={tmp_path}", "run.name=x", "ops.adamw=fused", "ops.attention=sdpa", "precision=bf16"]
    )
    state, step = build(config, Mesh(CPU))
    meta = torch.device("meta")
    with closing(state.loader):
        state.loader._device, step = meta, replace(step, mesh=Mesh(meta))
        state.parts[0].to(meta)
        copy_weights(state.parts, step.mesh, Policy(torch.bfloat16, ""))  # as on a GPU
        weights = list(state.named_parameters())
        state.optimizer = build_optimizer(config.optimizer, weights, fused_adam=True)
        state.scaler = LossScaler(2.0**10, 4, 1, 1.0, 2.0) if scaled else None
        decisions = Decisions(state.scaler, meta)
        sent: list[tuple[int, ...]] = []

        def see(func: Any, args: Any, out: Any) -> None:
            moves = {torch.ops.aten.copy_.default: 1, torch.ops.aten._to_copy.default: 0}
            if func in moves and (out.device.type, args[moves[func]].device.type) == ("meta", "cpu"):
                sent.append(tuple(args[moves[func]].shape))

        with Watching(see):
            for _ in range(2):
                step.begin(state, decisions=decisions)
        assert sent == 2 * 2 * [(2, 32), (2, 32), (2,)]
        assert state.step == 2
        with pytest.raises((RuntimeError, NotImplementedError)):
            step.begin(state)  # the host decides: it reads
