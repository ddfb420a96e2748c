"""Memory as planned is what real ranks take, and the paper's arithmetic is the paper's."""

import time
from dataclasses import replace

import pytest
from marking import combinations, marked

from gptlite.optimizer.config import AdamWConfig, MuonConfig, SGDConfig
from gptlite.satellites.monitor.model_state import paper_bytes_a_parameter
from gptlite.satellites.optimizers.configs import AdafactorConfig, LambConfig, LionConfig
from gptlite.satellites.plan import watch
from gptlite.satellites.plan.memory import estimate, most, passes_of
from gptlite.satellites.plan.profile import profile_of
from gptlite.satellites.plan.simulate import simulate
from plan.truth import workload
from plan.truth_layouts import LAYOUTS, QUICK, Layout
from plan.truth_table import Row, run

TOLERANCE = 0.05


def wrong(rows: list[Row]) -> list[str]:
    """The rows that differ by more than they may, or at all in what is sent."""
    return [
        f"{row.layout.name} {row.place}: state {row.state_error:+.1%}, else {row.error:+.1%}, {row.wrong}"
        for row in rows
        if abs(row.state_error) > TOLERANCE or abs(row.error) > TOLERANCE or row.wrong
    ]


def wrong_twice(layouts: list[Layout]) -> list[str]:
    """The rows that are wrong whenever their layout is measured.

    A measurement is not exact on a busy machine: one of four ranks took 7% more once in four runs of all slow tests,
    and never when its layout was measured alone (presumably buffers that gloo's threads release late). An error of
    the planner is there each time.
    """
    first = list(run(layouts))
    again = {row.layout for row in first if wrong([row])}
    return wrong(list(run([each for each in layouts if each in again]))) if again else []


@pytest.mark.slow
def test_real_ranks_take_what_is_planned():
    rows = list(run(QUICK))
    assert len(rows) >= len(QUICK)
    assert wrong(rows) == []


@pytest.mark.parametrize("world", marked([1, 2, 4, 8], slow=3))
def test_more_layouts_take_what_is_planned(world):
    layouts = [each for each in LAYOUTS if each.world == world and each not in QUICK]
    assert layouts
    assert wrong_twice(layouts) == []


@pytest.mark.slow
def test_there_are_more_than_thirty_layouts_and_every_schedule_among_them():
    assert len(set(LAYOUTS)) == len(LAYOUTS) >= 30
    configs = [layout.config().parallelism for layout in LAYOUTS]
    assert {c.schedule for c in configs if c.pipeline > 1} == {
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "zero_bubble",
        "zbv",
    }
    assert {c.zero for c in configs} == {0, 1, 2, 3}


def test_the_paper_is_reproduced_to_the_printed_digit():
    """ZeRO, arXiv:1910.02054, figure 1: 7.5 billion parameters over 64 ranks."""
    printed = [round(7.5 * paper_bytes_a_parameter(stage, 64, 2), 1) for stage in range(4)]
    assert printed == [120.0, 31.4, 16.6, 1.9]


def test_memory_follows_the_layout():
    one = workload(Layout(1, "").config(), 1)
    cut = workload(Layout(2, "tp=2").config(), 2)
    assert estimate(cut, 0).parameters < 0.6 * estimate(one, 0).parameters
    shorter = replace(one, micro_batch_size=2)
    assert estimate(shorter, 0).activations < 0.6 * estimate(one, 0).activations
    assert estimate(replace(one, optimizer=SGDConfig(momentum=0.0)), 0).optimizer == 0


def test_fp8_saves_its_operands_in_one_byte():
    """On a GPU, where quantization is compiled. Each linear layer of a block saves its input and its weight, which the
    bf16 run saves too, as 2 bytes and as a parameter."""
    work = replace(workload(Layout(1, "dtype=fp8 micro=8").config(), 1), device="cuda")
    fp8, bf16 = estimate(work, 0), estimate(replace(work, fp8=False), 0)
    assert 0.75 * bf16.activations < fp8.activations < 0.9 * bf16.activations
    assert replace(fp8, activations=0) == replace(bf16, activations=0)


STATE_LAYOUTS = [
    Layout(1, ""),
    Layout(4, "tp=2 zero=3"),
    Layout(4, "pp=2 schedule=1f1b zero=1 micro=1"),
    Layout(8, "tp=2 pp=2 schedule=1f1b zero=2 tied=false micro=1"),
]


STATE_CASES = combinations(
    [MuonConfig, AdafactorConfig, LionConfig, LambConfig, AdamWConfig],
    STATE_LAYOUTS,
    first=[(MuonConfig, STATE_LAYOUTS[-1]), (AdafactorConfig, STATE_LAYOUTS[1]), (LionConfig, STATE_LAYOUTS[0])],
)


@pytest.mark.parametrize(("config", "layout"), marked(STATE_CASES, quick=1, slow=22))
def test_an_optimizers_state_is_what_is_planned(config, layout):
    """By a step of rank 0 with imagined ranks."""
    work = replace(workload(layout.config(), layout.world), optimizer=config())
    assert simulate(work, 0).peak.optimizer == estimate(work, 0).optimizer > 0


PRECISIONS = ["zero=2 micro=2 dtype=amp_o2", "zero=3 micro=2 dtype=amp_o1", "zero=2 micro=2 dtype=bf16_stochastic"]


@pytest.mark.parametrize("words", [pytest.param(words, marks=pytest.mark.slow) for words in PRECISIONS])
def test_precisions_take_among_four_imagined_ranks_what_is_planned(words: str):
    work = workload(Layout(4, words).config(), 4)
    found, expected = simulate(work, 0).peak, estimate(work, 0)
    assert replace(found, activations=0) == replace(expected, activations=0)
    assert expected.activations == pytest.approx(found.activations, rel=TOLERANCE)


@pytest.mark.slow
def test_a_reduction_that_takes_the_most_is_planned():
    """With few tokens, in 16 bits, a reduction's buffers take more memory than any layer."""
    work = workload(Layout(4, "zero=2 micro=1 batch=4 dtype=bf16").config(), 4)
    work = replace(work, sequence_length=16, model=replace(work.model, sequence_length=16))
    assert estimate(work, 0).activations == pytest.approx(simulate(work, 0).peak.activations, rel=TOLERANCE)


@pytest.mark.parametrize("layers", [4, 6, 8, 10])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_the_fullest_rank_of_a_pipeline_is_found(schedule, layers):
    words = f"pp=4 schedule={schedule} micro=1 rows=50"
    if schedule not in ("gpipe", "1f1b"):
        layers *= 2
    work = workload(Layout(4, f"{words} layers={layers}").config(), 4)
    rank, found = most(work)
    assert found.total == max(estimate(work, each).total for each in range(4))
    assert found == estimate(work, rank)


def test_an_estimate_takes_less_than_a_millisecond():
    work = workload(Layout(8, "pp=4 zero=2 schedule=interleaved_1f1b micro=1 layers=8").config(), 8)
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(20):
            estimate(work, 0)
        rounds.append((time.process_time() - started) / 20)
    assert min(rounds) < 1e-3


def test_a_longer_reduction_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The comparison has teeth: the planner's figures change with what it believes of the engine."""

    def forget() -> None:
        for cache in (profile_of, passes_of):
            vars(cache)["cache_clear"]()

    work = workload(Layout(2, "zero=3 micro=2").config(), 2)
    before = estimate(work, 0).activations
    monkeypatch.setattr(watch, "workspace_bytes", lambda *_: 0)
    forget()
    assert estimate(work, 0).activations < 0.95 * before
    forget()
