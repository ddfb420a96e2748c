"""The simulation of a rank: against real ranks, and against itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch.distributed as dist
from distributed.cells.run import Ranks
from marking import marked
from models.weights import matmul_parameters

from gptlite.config import Config, load
from gptlite.ops.config import Attention
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.simulate import Simulation, enough, peak, simulate
from gptlite.satellites.plan.simulate import counted as counted_of
from gptlite.satellites.plan.watch import Change
from gptlite.torch_private.simulation import imagined_world
from plan.truth import BASE, Counted, counted, workload

# Small blocks of 64 x 64 weights and 128 tokens: activations are what there is most of.
MODEL = """
data.vocab_size=200 model=gpt-lite model.num_heads=4 model.d_model=64 model.sequence_length=64 data.micro_batch_size=2
""".split()
CLOSE = 0.05  # of activations
LAYOUTS = {
    2: [
        "tensor=2",
        "tensor=2 sequence=true",
        "tensor=2 activation_checkpointing=full",
        "data=2",
        "data=2 zero=1",
        "data=2 zero=2",
        "data=2 zero=3",
        "data=2 zero=3 activation_checkpointing=full",
        "pipeline=2 schedule=gpipe",
        "pipeline=2 schedule=1f1b",
        "pipeline=2 schedule=1f1b activation_checkpointing=selective",
        "pipeline=2 schedule=interleaved_1f1b",
        "pipeline=2 schedule=zero_bubble",
        "pipeline=2 schedule=zbv",
    ],
    4: [
        "tensor=2 pipeline=2 schedule=1f1b",
        "pipeline=4 schedule=1f1b",
        "pipeline=2 data=2 zero=2 schedule=interleaved_1f1b",
        "pipeline=2 data=2 zero=3 schedule=zbv",
        "tensor=2 data=2 zero=3 sequence=true",
        "data=4 zero=3 dp_replicate=2",
    ],
}


@cache
def config(layout: str = "", layers: int = 4, micro_batches: int = 4, data: int = 1) -> Config:
    keys = [f"parallelism.{key}" for key in layout.split()]
    shape = [f"model.num_layers={layers}", f"data.global_batch_size={2 * micro_batches * data}"]
    return load([*BASE, *MODEL, *shape, *keys])


def wrong(simulated: Simulation, found: list[Counted]) -> str:
    """How a simulated rank differs from the real one, counted several times; empty where it does not."""
    ours, real = simulated.peak, found[0].bytes
    state = [(each.parameters, each.gradients, each.optimizer) for each in (ours, real)]
    if state[0] != state[1]:
        return f"model state {state[0]}, not {state[1]}"
    if set(simulated.transfers) != set(found[0].transfers):
        return f"transfers {simulated.transfers}, not {found[0].transfers}"
    # gloo's threads may hold a buffer for longer, which only adds.
    least = min(each.bytes.activations for each in found)
    if abs(ours.activations / least - 1) > CLOSE:
        return f"activations {ours.activations}, not {least}"
    return ""


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_take_and_send_what_is_simulated(world):
    """Model state and transfers exactly, activations within 5%."""
    failures = {}
    with Ranks(world, collective_timeout=200) as ranks:
        for layout in LAYOUTS[world]:
            settings = dict(each.split("=") for each in layout.split())
            run = config(layout, data=int(settings.get("data", 1)))
            times = 3 if "tensor" in settings else 1
            found = [ranks.run("plan.truth:counted", run, timeout=200) for _ in range(times)]
            work = workload(run, world)
            for rank in sorted({0, world - 1}):
                if problem := wrong(simulate(work, rank), [each[rank] for each in found]):
                    failures[layout, rank] = problem
    assert failures == {}


@pytest.mark.parametrize("more", ["", "activation_checkpointing=full"])
def test_one_process_takes_what_is_simulated(more):
    run = config(more, layers=2, micro_batches=2)
    simulated, found = simulate(workload(run, 1), 0), counted(run)
    assert wrong(simulated, [found]) == ""
    assert simulated.peak.activations == pytest.approx(found.bytes.activations, rel=0.002)
    assert simulated.transfers == []


def test_flops_are_those_of_the_model():
    """6 a weight and token, and of attention 2 products forward and 5 backward, of half the scores."""
    work = workload(config(layers=2, micro_batches=2), 1)
    length, shape = work.sequence_length, work.model
    attention = 7 * shape.num_layers * shape.d_model * length
    assert simulate(work, 0).flops == work.tokens * (6 * matmul_parameters(shape) + attention)


@pytest.mark.parametrize("schedule", marked(["1f1b", "gpipe", "interleaved_1f1b"], quick=1, slow=2))
def test_further_micro_batches_are_more_of_the_same(schedule):
    """All of them simulated, and the first ones with the difference for each of the others."""
    layers, count, few = (4, 8, 6) if schedule == "interleaved_1f1b" else (2, 6, 4)
    work = workload(config(f"pipeline=2 schedule={schedule}", layers, micro_batches=count), 2)
    assert enough(work)[1] == few
    assert simulate(work, 0) == Simulation.of(counted_of(work, 0, count))


def test_the_micro_batches_in_flight_come_out():
    """1F1B's first rank keeps activations of both micro-batches in flight, its last of one; GPipe keeps all."""
    one, all_four = (config(f"pipeline=2 schedule={name}", layers=2) for name in ("1f1b", "gpipe"))
    first, last = (simulate(workload(one, 2), rank).peak.activations for rank in (0, 1))
    assert first > 1.4 * last
    assert simulate(workload(all_four, 2), 0).peak.activations > 1.5 * first


def test_any_rank_of_a_thousand():
    """Sent by a rank in the middle of 1,024: as arithmetic has it. On GPUs FSDP2's collectives are NCCL's."""
    run = config("pipeline=4 tensor=4 sequence=true", layers=4, micro_batches=8)
    layout = resolve(run.parallelism, 1024)
    work = replace(workload(run, 16), layout=layout, global_batch_size=2 * 8 * layout.data_size)
    work = replace(work, dtype="bf16", attention=Attention.sdpa, device="cuda")
    found = simulate(work, 2 * 256 + 5)
    activation = 2 * 64 * 64 * 2 // 4  # a micro-batch's, cut along the sequence, in bf16
    pp = {(each.kind, each.phase): (each.payload, each.count) for each in found.transfers if each.axis == "pp"}
    assert pp == {(kind, phase): (activation, 8) for kind in ("send", "recv") for phase in ("forward", "backward")}
    tp = {(each.kind, each.phase): each.count for each in found.transfers if each.axis == "tp"}
    # Of one block: two gathered inputs and two scattered sums forward, two of each backward, and the inputs again.
    assert tp == {
        ("all_gather", "forward"): 16,
        ("reduce_scatter", "forward"): 16,
        ("all_gather", "backward"): 32,
        ("reduce_scatter", "backward"): 16,
        ("all_reduce", "step"): 1,
    }
    assert {each.ranks for each in found.transfers if each.axis == "dp_replicate"} == {64}


def test_bytes_of_a_hand_made_step():
    """A weight of 10 from before the step, a gradient of 4 that is state once sampled, and activations of 3 and 5."""
    changes = [(0, 10), (1, 3), (2, 5), (1, -3), (3, 4), (2, -5), (3, -4)]
    state = {"parameters": {0: 10}, "gradients": {3: 4}, "optimizer": dict[int, int]()}
    log = [Change(*each) for each in changes]
    assert peak(log, 1, [state]) == {"parameters": 10, "gradients": 4, "optimizer": 0, "activations": 8}
    assert peak(log, 4, [state])["activations"] == 5


def test_what_cannot_be_simulated():
    work = workload(config(), 1)
    with pytest.raises(ValueError, match="rank 1 is outside the world"):
        simulate(work, 1)
    two = workload(config("tensor=2"), 2)
    with imagined_world(0, 2), pytest.raises(RuntimeError, match="a separate process"):
        simulate(two, 0)
    assert not dist.is_initialized()
