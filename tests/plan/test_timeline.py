"""The order of a pipeline's passes, and when they run."""

import logging
import time
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from marking import marked
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, num_stages, schedule_refuses, stages_of_rank, stages_per_rank
from gptlite.satellites.plan.capacity import least_in_flight
from gptlite.satellites.plan.timeline import Timeline, order, timeline

CASES = [
    (schedule, ranks, virtual, count)
    for schedule, rule in SCHEDULES.items()
    for ranks in (2, 3, 4, 7, 8)
    for virtual in ([None] if rule.fixed else [1, 2, 3, 4])
    for count in (1, 2, 3, 4, 5, 8, 12, 16, 21)
    if rule.runs(ranks, count)
]

LONG = [(*case, 64) for case in dict.fromkeys(case[:3] for case in CASES) if SCHEDULES[case[0]].runs(case[1], 64)]
SETS = pytest.mark.parametrize("cases", marked([CASES, LONG], quick=1, slow=1, name=lambda cases: f"{len(cases)}"))


def config(schedule: str, ranks: int, virtual: int | None = None) -> ParallelismConfig:
    return ParallelismConfig(pipeline=ranks, schedule=schedule, virtual_stages=virtual)


def equal(layout: ParallelismConfig, count: int, message: float = 0.0) -> Timeline:
    """A forward pass through all stages of a rank takes 1 s, a backward pass 2 s."""
    share = [1 / stages_per_rank(layout)] * num_stages(layout)
    return timeline(layout, count, share, [2 * each for each in share], message)


def torch_order(layout: ParallelismConfig, count: int) -> dict[int, list[tuple[str, int, int]]]:
    """What torch's schedule runs on every rank: of one stage a rank, as it does it; else from the list it goes by."""
    logging.getLogger(schedules.__name__).setLevel(logging.ERROR)  # it warns of bubbles
    made = get_schedule_class(SCHEDULES[layout.schedule].torch_name)
    if layout.schedule in ("gpipe", "1f1b"):
        ran = {rank: Stage(layout, rank) for rank in range(layout.pipeline)}
        for stage in ran.values():
            schedule = made(stage, count)
            schedule._initialize_stage = lambda *_: None
            schedule._step_microbatches([()] * count, [{}] * count)
        return {rank: stage.ran for rank, stage in ran.items()}
    schedule = made([Stage(layout, number) for number in range(0, num_stages(layout), layout.pipeline)], count)
    return {
        rank: [
            (a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in actions
            if a.computation_type.value in ("F", "B", "I", "W")
        ]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }


class Stage(PipelineStage):
    """As much of a stage as a schedule asks for. It notes what it is to do and does nothing."""

    def __init__(self, layout: ParallelismConfig, number: int) -> None:
        self.group_size, self.group_rank, self.stage_index = layout.pipeline, number % layout.pipeline, number
        self.num_stages, self.has_backward = num_stages(layout), True
        self._forward_chunk_states: dict[int, object] = {}  # of torch 2.15
        self.submod = SimpleNamespace()
        self.stage_index_to_group_rank = {stage: stage % layout.pipeline for stage in range(num_stages(layout))}
        self.ran: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.ran.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: object) -> None:
        self.ran.append(("B", self.stage_index, number))

    def _nothing(self, *_: object) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = _nothing  # type: ignore[assignment]
    get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = _nothing  # type: ignore[assignment]


def test_there_are_more_than_250_cases():
    assert len(CASES) > 250


@SETS
def test_every_order_is_torchs(cases):
    for schedule, ranks, virtual, count in cases:
        layout = config(schedule, ranks, virtual)
        ours = {rank: order(layout, rank, count) for rank in range(ranks)}
        assert ours == torch_order(layout, count), (schedule, ranks, virtual, count)


ANALYZE: Any = getattr(schedules, "analyze_pipeline_activation_liveness", None)


@pytest.mark.skipif(ANALYZE is None, reason="of torch 2.15 and later")
def test_as_many_micro_batches_are_in_flight_as_torch_says():
    """Slots for the activations of each rank's stages, from a forward pass to the pass for the weights' gradients."""
    for schedule, ranks, virtual, count in CASES:
        if schedule in ("gpipe", "1f1b"):  # of one stage a rank, which torch does not analyze
            continue
        layout = config(schedule, ranks, virtual)
        made = get_schedule_class(SCHEDULES[schedule].torch_name)
        torchs = made([Stage(layout, number) for number in range(0, num_stages(layout), ranks)], count)
        for rank in range(ranks):
            found = ANALYZE(
                torchs, pp_rank=rank, stage_indices=stages_of_rank(layout, rank), granularity="stage_microbatch"
            )
            kinds = [kind for kind, *_ in order(layout, rank, count)]
            level = accumulate((kind == "F") - (kind in "BW") for kind in kinds)
            slots = len(set(found.slot_by_stage_and_microbatch.values()))
            assert slots == max(level), (schedule, ranks, virtual, count)


@SETS
def test_every_order_runs_to_its_end(cases):
    """Also with messages: each stage has each micro-batch's passes once, and inputs before what needs them."""
    for schedule, ranks, virtual, count in cases:
        layout = config(schedule, ranks, virtual)
        events = equal(layout, count, message=0.25).events
        kinds = "FIW" if SCHEDULES[schedule].splits_backward else "FB"
        stages = num_stages(layout)
        assert {(e.kind, e.stage, e.micro_batch) for e in events} == {
            (kind, stage, number) for kind in kinds for stage in range(stages) for number in range(count)
        }
        assert len(events) == len(kinds) * stages * count
        ends = {(e.kind.replace("I", "B"), e.stage, e.micro_batch): (e.end, e.rank) for e in events}
        for e in events:
            before = {"F": ("F", e.stage - 1), "B": ("B", e.stage + 1), "I": ("B", e.stage + 1)}.get(e.kind)
            given = ends.get((*before, e.micro_batch)) if before else None
            if given is not None:
                assert e.start >= given[0] + (0.25 if given[1] != e.rank else 0) - 1e-9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 4), (4, 16), (8, 64)])
def test_bubble_of_one_stage_a_rank(schedule, ranks, count):
    """(p - 1) / (m + p - 1): Narayanan et al. 2021, arXiv:2104.04473, section 2.2, as a share of the whole step."""
    line = equal(config(schedule, ranks), count)
    expected = (ranks - 1) / (count + ranks - 1)
    assert [line.bubble(rank) for rank in range(ranks)] == pytest.approx([expected] * ranks)
    assert line.seconds == pytest.approx(3 * (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "virtual", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 64)])
def test_bubble_of_interleaved_stages(ranks, virtual, count):
    """(p - 1) / (v m + p - 1): the same, section 2.2."""
    line = equal(config("interleaved_1f1b", ranks, virtual), count)
    expected = (ranks - 1) / (virtual * count + ranks - 1)
    assert [line.bubble(rank) for rank in range(ranks)] == pytest.approx([expected] * ranks)


def test_zero_bubble_schedules_wait_less():
    """ZBV's passes fit without a gap where F, I and W take equally long, but for the way to the end and back."""
    ranks, count = 4, 16
    plain = equal(config("interleaved_1f1b", ranks), count).bubble(0)
    assert equal(config("zero_bubble", ranks), count).bubble(0) < 0.6 * plain
    line = equal(config("zbv", ranks), count)
    assert line.bubble(0) < 0.6 * plain
    assert line.seconds == pytest.approx(3 * count + (ranks - 1) / 2)


def test_messages_and_unequal_stages_take_their_time():
    line = timeline(config("gpipe", 2), 1, [1.0, 4.0], [2.0, 8.0], 0.5)
    assert [(e.rank, e.kind, e.start, e.end) for e in line.events] == [
        (0, "F", 0.0, 1.0),
        (0, "B", 14.0, 16.0),
        (1, "F", 1.5, 5.5),
        (1, "B", 5.5, 13.5),
    ]
    assert (line.seconds, line.busy(0), line.bubble(0)) == (16.0, 3.0, 1 - 3 / 16)


def test_no_message_at_the_bend_of_a_v():
    line = timeline(config("zbv", 2), 1, [1.0] * 4, [2.0] * 4, 10.0)
    starts = {(e.kind, e.stage): e.start for e in line.events}
    assert [starts["F", stage] for stage in range(4)] == [0.0, 11.0, 12.0, 23.0]
    assert starts["I", 0] - starts["I", 3] == 1.0 + 10 + 1.0 + 1.0 + 1.0 + 10  # the third is W of stage 2


def most_in_flight(layout: ParallelismConfig, rank: int, count: int) -> int:
    """The most (stage, micro-batch) pairs that a rank keeps activations of at once."""
    changes = ({"F": 1, "I": 0}.get(kind, -1) for kind, *_ in order(layout, rank, count))
    return max(accumulate(changes))


def test_micro_batches_in_flight():
    """1F1B keeps one for each rank behind it, GPipe all, a V as many as 1F1B's first rank on every rank."""
    ranks, count = 4, 12

    def of(schedule: str) -> list[int]:
        return [most_in_flight(config(schedule, ranks), rank, count) for rank in range(ranks)]

    assert of("1f1b") == [4, 3, 2, 1]
    assert of("gpipe") == [count] * ranks
    assert of("zbv") == [2 * ranks] * ranks
    assert of("interleaved_1f1b") == [11, 9, 7, 5]
    assert of("zero_bubble") == [8] * ranks  # until the weights' gradients, which the later ranks put off


@SETS
def test_the_first_rank_has_no_fewer_in_flight_than_the_search_takes_for_granted(cases):
    for schedule, ranks, virtual, count in cases:
        layout = config(schedule, ranks, virtual)
        most = most_in_flight(layout, 0, count)
        assert 0.45 * most <= least_in_flight(layout, count) <= most, (schedule, ranks, virtual, count)


def test_one_rank_alternates():
    line = timeline(ParallelismConfig(), 3, [1.0], [2.0], 0.0)
    assert [event.kind for event in line.events] == ["F", "B"] * 3
    assert (line.seconds, line.bubble(0)) == (9.0, 0.0)


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="at least 4 micro-batches"):
        order(config("1f1b", 4), 0, 3)
    assert schedule_refuses(config("interleaved_1f1b", 4), 9)
    with pytest.raises(ValueError, match="in equal rounds"):
        equal(config("interleaved_1f1b", 4), 9)
    with pytest.raises(ValueError, match="3 forward and 4 backward durations for 4 stages"):
        timeline(config("gpipe", 4), 1, [1.0] * 3, [1.0] * 4, 0.0)


@pytest.mark.parametrize("schedule", marked(["1f1b", "zero_bubble"], quick=1, slow=1))
def test_a_large_pipeline_takes_about_a_second(schedule):
    started = time.process_time()
    assert equal(config(schedule, 64), 512).seconds > 3 * 512
    assert time.process_time() - started < 4  # on a busy machine
