"""What follows from an order for memory and traffic is what the order says."""

from collections import Counter
from types import SimpleNamespace

from gptlite.parallelism.layout import stages_of_rank
from gptlite.satellites.plan.memory import ModelState
from gptlite.satellites.plan.timeline import order
from gptlite.satellites.plan.walk import gathers, turns
from plan.test_timeline import SETS, config


def every(cases):
    for schedule, ranks, virtual, count in cases:
        layout = config(schedule, ranks, virtual)
        for rank in {0, 1, ranks - 1}:
            yield layout, rank, count, order(layout, rank, count)


@SETS
def test_turns_are_the_order(cases):
    for layout, rank, count, passes in every(cases):
        mine, (different, numbers) = stages_of_rank(layout, rank), turns(layout, rank, count)
        assert len(set(different)) == len(different)
        assert [different[number][:4] for number in numbers] == [
            (mine.index(stage), kind, kind != "I" and number == 0, kind in "BW" and number == count - 1)
            for kind, stage, number in passes
            if kind != "I" or stage > 0  # nobody wants the gradient of tokens
        ]


@SETS
def test_model_state_is_that_of_every_backward_pass(cases):
    for layout, rank, count, passes in every(cases):
        mine = stages_of_rank(layout, rank)
        place = {stage: index for index, stage in enumerate(mine)}
        for frees in (False, True):
            found = list(replayed(layout, rank, count, mine, frees))
            assert found == list(walked(passes, place, count, frees))


def replayed(layout, rank, count, mine, frees):
    """The changes of each pass added up: gradients of some micro-batches count 1, of all of them 100."""
    there, sums = Counter(), Counter()
    different, numbers = turns(layout, rank, count)
    for turn in (different[number] for number in numbers):
        stage = SimpleNamespace(gathered=1, reduced=1, done=100, frees=frees, first=mine[turn.place] == 0)
        gathers, freed, summed = ModelState.changes(stage, turn)  # type: ignore[arg-type]
        there[turn.place] += gathers
        if turn.kind != "F":
            some, whole = (tuple(sorted(each for each in sums if sums[each] == size)) for size in (1, 100))
            yield tuple(sorted(+there)), some, whole
        there[turn.place] -= freed
        sums[turn.place] += summed


def walked(passes, place, count, frees):
    """One backward pass after the other."""
    there, done = set(), dict.fromkeys(place.values(), 0)
    for kind, stage, _ in passes:
        mine = place[stage]
        computes = kind in "FBW" or stage > 0  # nobody wants the gradient of tokens
        if kind == "F" or (frees and (kind in "BI" if stage > 0 else kind in "BW")):
            there.add(mine)
        if kind == "F" or not computes:
            continue
        some = tuple(sorted(each for each, number in done.items() if 0 < number < count))
        whole = tuple(sorted(each for each, number in done.items() if number == count))
        yield tuple(sorted(there)), some, whole
        done[mine] += kind != "I"
        if frees or done[mine] == count:
            there.discard(mine)


@SETS
def test_gathers_are_counted_pass_by_pass(cases):
    for layout, rank, count, passes in every(cases):
        found = gathers(layout, rank, count)
        for place, stage in enumerate(stages_of_rank(layout, rank)):
            kinds = [kind for kind, number, _ in passes if number == stage and (kind != "I" or stage > 0)]
            for block in (True, False):
                counts, there = {True: 0, False: 0}, False
                for kind in kinds:
                    counts[kind == "F"] += not there
                    there = kind == "F" and not block
                assert (found[place, block, "forward"], found[place, block, "backward"]) == (
                    counts[True],
                    counts[False],
                )
