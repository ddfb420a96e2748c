"""The sizes and samples of global batches, against a plain walk over the samples."""

import itertools
from dataclasses import replace

import pytest

from gptlite.data.batches import BatchSchedule, batch_schedule
from gptlite.errors import ConfigError

RAMPS = [None, (4, 4, 200), (2, 7, 90), (16, 1, 1), (1, 1, 1000), (16, 3, 50)]
SKIPS = [[], [(0, 5)], [(7, 8), (30, 61)], [(61, 64), (3, 40), (39, 45), (500, 501), (64, 66)], [(15, 1000)]]


GROWN = ((20, 6), (44, 8), (100, 14))  # as a run might have measured them


def walked(size: int, ramp: tuple[int, int, int] | None, skipped: list[tuple[int, int]], steps: int) -> list[list[int]]:
    """The samples of each batch, one sample after the other. The size as Megatron's rule has it, in exact fractions."""
    gone = {number for first, stop in skipped for number in range(first, stop)}
    row = (number for number in itertools.count() if number not in gone)
    batches, waiting = [], next(row)
    for _ in range(steps):
        now = size
        if ramp is not None and waiting < ramp[2] and size > ramp[0]:
            increments = (size - ramp[0]) // ramp[1]
            now = ramp[0] + ramp[1] * (waiting * increments // ramp[2])
        batch = [waiting, *itertools.islice(row, now - 1)]
        waiting = next(row)
        batches.append(batch)
    return batches


@pytest.mark.parametrize("skipped", SKIPS, ids=str)
@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_batches_are_those_of_a_walk_over_the_samples(ramp, skipped):
    schedule = batch_schedule(16, ramp).skipping(skipped)
    position, seen = 0, 0
    for step, batch in enumerate(walked(16, ramp, skipped, steps=150)):
        assert schedule.samples(position).tolist() == batch
        assert schedule.size(position) == len(batch)
        assert schedule.size(position) in schedule.sizes()
        assert schedule.trained(position) == seen
        assert schedule.after(0, step) == batch[0]
        assert schedule.after(batch[0], 0) == batch[0]
        position, seen = schedule.after(position), seen + len(batch)


@pytest.mark.parametrize("skipped", SKIPS, ids=str)
def test_measured_sizes_begin_where_they_were_decided(skipped):
    schedule = replace(batch_schedule(16, [4, 2]), grown=GROWN).skipping(skipped)
    assert schedule.sizes() == [4, 6, 8, 10, 12, 14, 16]
    gone = {number for first, stop in skipped for number in range(first, stop)}
    left = (number for number in itertools.count() if number not in gone)
    waiting, seen = next(left), 0
    for step in range(60):
        size = next((size for begin, size in reversed(GROWN) if begin <= waiting), 4)
        batch = [waiting, *itertools.islice(left, size - 1)]
        assert schedule.samples(batch[0]).tolist() == batch
        assert schedule.trained(batch[0]) == seen
        assert schedule.after(0, step) == batch[0]
        waiting, seen = next(left), seen + size
    assert not batch_schedule(16, [4, 2, 8]).measured


def test_the_ramp_of_megatrons_own_example():
    """`--rampup-batch-size 16 8 300000` up to 1024: 126 increments, one about every 2380 samples."""
    schedule = batch_schedule(1024, [16, 8, 300_000])
    assert len(schedule.sizes()) == 127
    assert [schedule.size(n) for n in (0, 2380, 2381, 4761, 4762)] == [16, 16, 24, 24, 32]
    assert [schedule.size(n) for n in (299_999, 300_000, 10**12)] == [1016, 1024, 1024]


def test_a_position_far_off_is_known_at_once():
    schedule = batch_schedule(1024, [16, 8, 300_000]).skipping([(50, 90)])
    far = schedule.after(0, 10**9)
    assert schedule.trained(far) == schedule.trained(schedule.after(0, 2000)) + (10**9 - 2000) * 1024


def test_skipping_what_was_skipped_changes_nothing():
    schedule = BatchSchedule(4).skipping([(8, 12)])
    assert schedule.skipping([(9, 12)]) == schedule.skipping([]) == schedule
    assert schedule.skipping([(12, 16), (2, 4)]).skipped == ((2, 4), (8, 16))


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        ([4, 5, 100], r"data\.batch_ramp=\[4, 5, 100\] does not reach data\.global_batch_size=16 from 4 in steps of 5; "
                      "take an increment that divides 12, e.g. 1"),
        ([20, 4, 100], "take a smaller start"),
        ([4], r"must be \[first size, increment, samples\], or \[first size, increment\] to follow the gradient noise"),
        ([4, 5], r"data\.batch_ramp=\[4, 5\] does not reach data\.global_batch_size=16"),
        ([0, 4, 100], "each at least 1"),
        ([4, 4, 0], "each at least 1"),
    ],
    ids=["uneven", "too large", "one number", "uneven, measured", "nothing", "no samples"],
)  # fmt: skip
def test_a_ramp_that_does_not_end_is_refused(ramp, words):
    with pytest.raises(ConfigError, match=words):
        batch_schedule(16, ramp)
