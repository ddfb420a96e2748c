"""Sample n of a run is a function of (seed, eras, n): nothing is repeated or left out, whatever changes on the way."""

import json
import time
import tracemalloc
from functools import cache

import numpy as np
import pytest

from gptlite.data.blend import BLOCK
from gptlite.data.eras import DataSet, Era
from gptlite.data.stream import SampleStream, read_chunks

LENGTH = 8
SIZES = {"a": 4000, "b": 900, "c": 30}
WEIGHTS = {"a": 5.0, "b": 2.0, "c": 0.01}


def stream(length=LENGTH, weights=WEIGHTS, seed=3):
    sets = {name: (f"sha {name}", np.arange(SIZES[name], dtype=np.uint16), w) for name, w in weights.items()}
    return SampleStream.begin(seed, length, sets)


def read_of(places, number):
    """(epoch, chunk) of the samples of one data set, in their order."""
    sets, epochs, chunks = places
    return list(zip(epochs[sets == number].tolist(), chunks[sets == number].tolist(), strict=True))


@cache
def alone(name):
    """(epoch, chunk) of the samples of a run of one data set."""
    return read_of(stream(weights={name: 1.0}).locate(np.arange(2 * BLOCK)), 0)


def test_every_epoch_of_every_set_is_whole_and_in_an_order_of_its_own():
    run = stream()
    places = run.locate(np.arange(3 * BLOCK))
    for number, name in enumerate(run.names):
        size, seen = (SIZES[name] - 1) // LENGTH, read_of(places, number)
        assert [epoch for epoch, _ in seen] == [n // size for n in range(len(seen))]
        epochs = [[chunk for _, chunk in seen[start : start + size]] for start in range(0, len(seen) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:200])
        assert size < 5 or epochs[0] != epochs[1]


@pytest.mark.parametrize("first", [0, 70, BLOCK - 3, 2 * BLOCK + 8190, 10**9])
def test_places_do_not_depend_on_what_was_asked_before(first):
    together = stream().locate(np.arange(first, first + 40))
    run = stream()
    for n in reversed(range(first, first + 40)):
        assert [int(each[0]) for each in run.locate(np.array([n]))] == [int(each[n - first]) for each in together]


@pytest.mark.parametrize("first", [0, BLOCK - 5, 8190, 10**8])
def test_reads_what_it_locates(first):
    run = stream()
    samples = np.arange(first, first + 20)
    sets, _, chunks = run.locate(samples)
    rows = run.read(samples)
    assert rows.dtype == np.uint16
    assert rows[:, 0].tolist() == (chunks * LENGTH).tolist()
    assert (np.diff(rows.astype(int)) == 1).all()
    assert len(set(sets.tolist())) > 1
    shuffled = np.random.default_rng(0).permutation(20)
    assert np.array_equal(run.read(samples[shuffled]), rows[shuffled])


def test_counts_are_how_many_came_before():
    run = stream()
    sets = run.locate(np.arange(2 * BLOCK))[0]
    for n in (0, 1, 777, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 7):
        assert list(run.counts(n).values()) == np.bincount(sets[:n], minlength=3).tolist()


def test_a_blend_of_one_is_the_order_of_that_set_alone():
    one, nine = (stream(weights={"a": weight}).locate(np.arange(999)) for weight in (1, 9))
    assert all(map(np.array_equal, one, nine))


@pytest.mark.parametrize("at", [1, 1000, BLOCK, BLOCK + 12345])
def test_other_weights_repeat_and_skip_nothing(at):
    """Each data set goes on where it was: the samples of the two eras are those of one run of that set."""
    before = stream()
    after = stream(weights={"b": 3.0, "a": 1.0}).resumed(before.eras, at)  # c leaves
    assert [era.start for era in after.eras] == [0, at]
    places = after.locate(np.arange(at + BLOCK))
    assert all(np.array_equal(a[:at], b) for a, b in zip(places, before.locate(np.arange(at)), strict=True))
    for name in "ab":
        seen = read_of(places, after.names.index(name))
        assert seen == alone(name)[: len(seen)]
    assert 2 not in places[0][at:]
    back = stream().resumed(after.eras, at + 500)  # c comes back, where it was
    seen = read_of(back.locate(np.arange(at + 500 + BLOCK)), back.names.index("c"))
    assert seen == read_of(stream(weights={"c": 1.0}).locate(np.arange(len(seen))), 0)


@pytest.mark.parametrize("length", [4, 16])
def test_another_length_begins_an_epoch_in_every_set(length):
    at = 700
    counts = stream().counts(at)
    run = stream(length).resumed(stream().eras, at)
    era = run.eras[-1]
    for name, each in era.sets.items():
        assert (each.epoch, each.position) == (-(-counts[name] // ((SIZES[name] - 1) // LENGTH)), 0)
    sets, epochs, chunks = run.locate(np.arange(at, at + 3000))
    size = (SIZES["a"] - 1) // length
    first = chunks[(sets == 0) & (epochs == era.sets["a"].epoch)]
    assert sorted(first.tolist())[:size] == list(range(size)) or len(first) < size
    assert run.read(np.arange(at, at + 4)).shape == (4, length + 1)
    with pytest.raises(ValueError, match=f"samples {at - 1} to {at} have different lengths"):
        run.read(np.array([at, at - 1]))


def test_going_on_without_a_change_is_no_era_wherever_it_happens():
    run = stream()
    for at in (0, 5, 5, 99999):
        run = stream(weights={name: 10 * weight for name, weight in WEIGHTS.items()}).resumed(run.eras, at)
        assert len(run.eras) == 1
        assert run.eras[0].like(stream().eras[0])


def test_a_change_that_no_sample_was_read_under_leaves_no_era():
    tried = stream(16).resumed(stream().eras, 1000)
    assert stream().resumed(tried.eras, 1000).eras == stream().eras
    rewound = stream().resumed(tried.eras, 400)  # from an older checkpoint
    assert rewound.eras == stream().eras


def test_a_folder_that_moved_is_the_same_set():
    moved = SampleStream.begin(
        3, LENGTH, {f"new/{n}": (f"sha {n}", np.arange(SIZES[n]), w) for n, w in WEIGHTS.items()}
    )
    run = moved.resumed(stream().eras, 500)
    assert run.names == ["new/a", "new/b", "new/c"]
    assert all(map(np.array_equal, run.locate(np.arange(900)), stream().locate(np.arange(900))))


def test_eras_survive_json():
    run = stream(16, {"a": 1.0, "b": 1.0}).resumed(stream().eras, 1234)
    assert [Era.from_json(json.loads(json.dumps(era.to_json()))) for era in run.eras] == list(run.eras)


def test_the_billionth_sample_costs_a_moment_and_little_memory():
    """A synthetic index: 200 data sets of up to 10**13 tokens, and no file behind them."""
    sizes = np.random.default_rng(5).integers(10**9, 10**13, size=200).tolist()
    era = Era(0, 2048, {f"set{n}": DataSet(f"sha {n}", size, 1.0 + n % 7) for n, size in enumerate(sizes)})
    tracemalloc.start()
    began = time.process_time()
    run = SampleStream(1, [era]).resumed([era], 10**9)
    sets, epochs, chunks = run.locate(np.arange(10**9, 10**9 + 1024))
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds <= 1
    assert peak < 50e6
    assert (epochs >= 0).all()
    assert (chunks < np.array([(size - 1) // 2048 for size in sizes])[sets]).all()


@pytest.mark.parametrize("size", [257, 1000, 4096, 65537, 10**6 + 3])
@pytest.mark.parametrize("seed", [0, 1, 1234])
def test_first_differences_look_drawn_at_random(size, seed):
    """Chi-squared of (next chunk - this chunk) modulo the size, in 64 bins: 63 degrees of freedom, 130 has p < 2e-6."""
    tokens = np.broadcast_to(np.uint16(0), size * LENGTH + 1)
    run = SampleStream.begin(seed, LENGTH, {"a": ("sha", tokens, 1.0)})
    count = min(size, 50_000)
    drawn = np.concatenate([run.locate(np.arange(e * size, e * size + count))[2] for e in range(-(-20_000 // count))])
    steps = np.diff(drawn) % size
    expected = np.bincount(np.arange(1, size) * 64 // size, minlength=64) / (size - 1) * len(steps)
    found = np.bincount(steps[steps > 0] * 64 // size, minlength=64)
    assert ((found - expected) ** 2 / expected).sum() < 130


def test_a_chunk_that_is_not_there_is_refused():
    with pytest.raises(IndexError):
        read_chunks(np.arange(17, dtype=np.uint16), np.array([2]), 8)
    assert read_chunks(np.arange(17, dtype=np.uint16), np.array([1, 0]), 8)[:, 0].tolist() == [8, 0]
    with pytest.raises(IndexError, match="sample -1 is below 0"):
        stream().locate(np.array([-1]))
