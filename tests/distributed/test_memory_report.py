"""What a run says of its memory: the banner's prediction, and the step that is measured."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gptlite.config import Config, load
from gptlite.errors import ConfigError
from gptlite.launch import room
from gptlite.launch.host_memory import GIB
from gptlite.launch.launcher import check_here
from gptlite.ops.select import select_ops
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.monitor.memory_phases import AFTER, phase_peaks
from gptlite.satellites.monitor.memory_report import MemoryReport
from gptlite.satellites.monitor.memory_watch import MemoryWatch, StateSnapshot, most_beside
from gptlite.satellites.parity.record import build
from gptlite.satellites.plan import banner
from gptlite.satellites.plan.banner import planned
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.workload import RankBytes, Workload
from gptlite.start.run import predicted
from gptlite.torch_private.allocations import recorded_allocations
from gptlite.torch_private.dispatch import profiler_runs
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Diverged, Step

BASE = """
data=synthetic data.vocab_size=500 data.num_tokens=20000 data.global_batch_size=8 data.micro_batch_size=4
model=gpt-lite model.num_layers=4 model.num_heads=4 model.d_model=64 model.sequence_length=64 precision=fp32
schedule=constant schedule.warmup_steps=0 run.dir=unused run.name=memory
""".split()
KEYS = ["memory_parameters_bytes", "memory_gradients_bytes", "memory_optimizer_bytes", "memory_activations_bytes"]


def started(*overrides: str) -> tuple[Config, TrainState, Step]:
    config = load([*BASE, *overrides])
    return config, *build(config, build_mesh(config.parallelism))


def expected(config: Config, state: TrainState, step: Step) -> RankBytes:
    policy, ops = resolve_precision(config.precision, step.mesh.device), select_ops(config.ops, step.mesh.device)
    config = replace(config, model=state.model.config)
    return estimate(planned(config, step.mesh.layout, step.mesh.device, policy, ops.attention), 0)


@pytest.fixture
def report() -> Iterator[Callable[[int], MemoryReport]]:
    """Makes the report of a run with a last step."""
    with ExitStack() as stack:
        yield lambda last: stack.enter_context(closing(MemoryReport(Mesh(torch.device("cpu")), last)))


def take(report: MemoryReport, step: Step, state: TrainState) -> float:
    with report.during(state):
        return step(state).loss


def test_the_second_step_is_measured_and_no_other(report):
    (_, state, step), (_, plain, plain_step) = started(), started()
    report, losses = report(9), []
    with closing(state.loader), closing(plain.loader):
        losses.append(take(report, step, state))
        assert report.row == {}
        assert report.lines() == []
        losses.append(take(report, step, state))
        row = dict(report.row)
        losses.append(take(report, step, state))
        assert losses == [plain_step(plain).loss for _ in range(3)]  # it changes nothing
    assert report.row == row
    assert list(row) == KEYS
    elements = sum(parameter.numel() for part in state.parts for parameter in part.parameters())
    assert row["memory_parameters_bytes"] == row["memory_gradients_bytes"] == 4 * elements
    assert row["memory_optimizer_bytes"] == pytest.approx(8 * elements, rel=0.001)  # and Adam's step counts
    assert not profiler_runs()
    (key, text), (by_phase, phases) = report.lines()
    assert by_phase == "tensors, by phase"
    assert [each.split()[0] for each in phases.split(", ")] == ["forward", "backward", "update"]
    assert key == "tensors, at most"
    assert text.startswith("parameters 926 KiB, gradients 926 KiB, optimizer 1.81 MiB, activations ")


def test_a_run_of_one_step_is_measured_too(report):
    _, state, step = started()
    report = report(1)
    with closing(state.loader):
        take(report, step, state)
    assert list(report.row) == KEYS


def test_a_step_that_fails_leaves_nothing_on(report):
    _, state, step = started()
    with torch.no_grad():
        next(state.parts[0].parameters()).fill_(torch.nan)
    with closing(state.loader), pytest.raises(Diverged):
        take(report(1), step, state)
    assert not profiler_runs()
    assert not state.parts[0]._forward_hooks
    assert not state.optimizer._optimizer_step_pre_hooks


def test_a_step_under_the_profiler_is_not_measured(report):
    _, state, step = started()
    report = report(1)
    with closing(state.loader):
        with torch.profiler.profile():
            take(report, step, state)
        assert report.row == {}
        take(report, step, state)
        assert list(report.row) == KEYS


@pytest.mark.parametrize(
    "overrides",
    [
        "precision=fp32",
        "precision=bf16",
        "model.dropout=0.1",
        "model.tied_embeddings=false data.micro_batch_size=8",
        "parallelism.activation_checkpointing=full model.num_layers=8",
        "parallelism.activation_checkpointing=selective model.num_layers=8",
        "model.sequence_length=512 ops.attention=matmul",
        "ops.attention=sdpa model.vocab_multiple=1",
    ],
)
def test_predictions_are_near_what_is_found(overrides):
    config, state, step = started(*overrides.split())
    with closing(state.loader):
        step(state)
        said = expected(config, state, step)
        with MemoryWatch(state.parts, state.optimizer, step.mesh.device, state.loader.num_micro_batches) as watch:
            step(state)
    found = watch.found()
    print(said.activations / found.activations, found)
    assert (said.parameters, said.gradients, said.optimizer) == astuple(found.state)
    assert said.activations == pytest.approx(found.activations, rel=0.05)


def test_a_watch_samples_in_the_last_backward_pass_and_before_the_update():
    part = nn.Linear(4, 4)
    optimizer = SGD(part.parameters())
    with MemoryWatch([part], optimizer, torch.device("cpu"), 3) as watch:
        assert watch.samples == []
        for taken in (0, 0, 1):
            part(torch.ones(4)).sum().backward()
            assert len(watch.samples) == taken
        optimizer.step()
    assert [sample.state.gradients for sample in watch.samples] == [80, 80]
    assert [sample.state.parameters for sample in watch.samples] == [80, 80]


def test_a_step_that_allocates_nothing_takes_nothing():
    watch = MemoryWatch([], SGD([nn.Parameter(torch.ones(2))]), torch.device("cpu"), 1)
    watch.sample()
    found = watch.found()
    assert (found.state.total, found.activations) == (8, 0)


def test_phases_take_turns():
    marks = [(0, "forward"), (10, "backward"), (20, "forward"), (30, "backward"), (40, "update"), (50, AFTER)]
    allocations = [
        (1, 1, 100),
        (2, 2, 50),
        (3, 2, -50),
        (12, 3, 400),
        (14, 3, -400),
        (15, 1, -100),
        (22, 4, 30),
        (31, 4, 60),  # the first at this address has been given back unseen
        (42, 5, 7),
        (60, 6, 5000),
    ]
    assert phase_peaks(allocations, marks, 1000) == {"forward": 1150, "backward": 1500, "update": 1067}


def test_phases_of_a_step():
    _, state, step = started("precision=fp32")
    with closing(state.loader):
        step(state)
        with MemoryWatch(state.parts, state.optimizer, step.mesh.device, state.loader.num_micro_batches) as watch:
            step(state)
    found = watch.found()
    parameters, phases = found.state.parameters, found.phases
    # At its end the forward pass has all activations; the backward pass has gradients with them; the update, no more.
    assert 3 * parameters < phases["forward"] < phases["backward"]
    assert 4 * parameters <= phases["update"] < 4.5 * parameters
    assert found.state.total < phases["backward"] <= found.state.total + found.activations + parameters


def test_the_banner_has_a_line(monkeypatch):
    config = load(BASE)
    text = predicted(config, 1)
    assert text.startswith("parameters 926 KiB, gradients 926 KiB, optimizer 1.81 MiB, activations ")
    assert "rank" not in text

    def fails(work: Workload, rank: int) -> RankBytes:
        raise RuntimeError("no such op\nmore")

    monkeypatch.setattr(banner, "estimate", fails)
    assert predicted(config, 1) == "n/a: no such op"


def test_a_model_beyond_the_machine_is_refused(monkeypatch):
    config = load(["model=gpt3-175b", "data=synthetic", "run.dir=unused", "run.name=memory"])
    monkeypatch.setattr(room, "memory_bytes", lambda: 2000 * GIB)
    assert check_here(config, None) == 1
    monkeypatch.setattr(room, "memory_bytes", lambda: 1900 * GIB)
    with pytest.raises(ConfigError, match=r"^gpt3-175b needs 1,9\d\d\.\d GiB for parameters .* has 1,900.0 GiB"):
        check_here(config, None)
    with pytest.raises(ConfigError, match="needs 3,9"):
        check_here(config, None, 2)


def test_what_samples_have_is_left_out():
    kept, passing, reused, unseen, left = 100, 200, 300, 400, 500
    allocations = [
        (1, kept, 64),
        (2, passing, 1000),
        (3, reused, 10),
        (4, passing, -1000),
        (5, 999, -77),  # from before
        (6, reused, -10),
        (7, reused, 500),
        (9, kept, -64),
        (10, reused, -500),
        (11, unseen, 2000),
        (12, unseen, 3000),  # so the first has been given back
        (13, unseen, -3000),
        (14, left, 9000),
    ]
    assert most_beside(allocations[:9], []) == 64 + 1000 + 10
    assert (
        most_beside(allocations[:9], [StateSnapshot(8, {"parameters": {kept: 64}, "gradients": {reused: 500}})]) == 1010
    )
    assert most_beside(allocations[:9], [StateSnapshot(20, {"parameters": {kept: 64}})]) == 64 + 1000 + 10
    assert most_beside(allocations, []) == 3000


def test_allocations_are_recorded_with_their_ends(capfd):
    with recorded_allocations():  # whose allocations the recorder remembers, and says the ends of later
        before = [torch.empty(500) for _ in range(3)]
    with recorded_allocations() as allocations:
        assert profiler_runs()
        before.clear()  # an end whose beginning was not recorded is left out
        tensor = torch.empty(1000)
        address = tensor.data_ptr()
        del tensor
    assert [(where, size) for _, where, size in allocations] == [(address, 4000), (address, -4000)]
    assert capfd.readouterr().err == ""
