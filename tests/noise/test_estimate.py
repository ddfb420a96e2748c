"""Estimates of a gradient's square and of its noise, against known ones: simulations in float64."""

import numpy as np
import pytest

from gptlite.satellites.noise.estimate import NoiseEstimate, mean_and_noise

DIMS, TRIALS = 6, 40_000


def known(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A quadratic model's mean gradient, and standard deviations of one target's gradient around it."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=DIMS) * 0.3, generator.uniform(0.5, 2, size=DIMS)


def simulated(sizes: list[int], trials: int = TRIALS, seed: int = 1) -> tuple[np.ndarray, np.ndarray, float]:
    """sum |c_i|^2 and |G|^2 of each trial, and W, for groups with so many targets."""
    mean, deviation = known()
    generator, total = np.random.default_rng(seed), sum(sizes)
    # The sum of T targets' gradients has the noise of T draws.
    parts = [size * mean + np.sqrt(size) * deviation * generator.normal(size=(trials, DIMS)) for size in sizes]
    groups = [part / total for part in parts]
    squares = sum((group**2).sum(1) for group in groups)
    return squares, (sum(groups) ** 2).sum(1), sum((size / total) ** 2 for size in sizes)


@pytest.mark.parametrize("sizes", [[8] * 2, [4] * 4, [2] * 8, [1, 3, 12], [15, 1]])
def test_estimates_are_unbiased(sizes):
    mean, deviation = known()
    squares, whole, weight = simulated(sizes)
    square, noise = mean_and_noise(squares, whole, weight)
    for estimates, truth in ((square, (mean**2).sum()), (noise, (deviation**2).sum() / sum(sizes))):
        error = estimates.std() / np.sqrt(TRIALS)
        assert abs(estimates.mean() - truth) < 4 * error
        assert 4 * error < 0.12 * truth  # the test can tell


def test_groups_counted_as_equal_would_be_biased():
    mean, _ = known()
    squares, whole, _ = simulated([15, 1])
    square, _ = mean_and_noise(squares, whole, 1 / 2)
    assert square.mean() < 0.5 * (mean**2).sum()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_averages_converge_to_the_noise_scale(count):
    mean, deviation = known()
    batch, errors = 16, []
    squares, whole, weight = simulated([batch // count] * count, trials=6000)
    estimate = NoiseEstimate()
    for step in range(6000):
        square, noise = mean_and_noise(squares[step], whole[step], weight)
        estimate.add(square, noise, batch, count)
        errors.append(estimate.noise_scale / ((deviation**2).sum() / (mean**2).sum()) - 1)
    # The average reaches back over 1000 / N steps, so its error does not vanish: docs/adascale.md has a table.
    assert np.sqrt(np.mean(np.square(errors[1000:]))) < 0.35
    assert abs(np.mean(errors[1000:])) < 0.08


def by_fairscale(locals_: np.ndarray, scale: float, steps: int) -> list[float]:
    """Gains by the formulas of FairScale's AdaScale, from local gradients [steps, N, dims] that are means."""
    count = locals_.shape[1]
    keep, biased, unbias, gains = max(1 - count / 1000, 0), np.zeros(2), 0.0, []
    for step in range(steps):
        local_sqr, total_sqr = (locals_[step] ** 2).sum(), (locals_[step].mean(0) ** 2).sum()
        var = local_sqr * scale / (count * (count - 1)) - total_sqr * scale / (count - 1)
        sqr = total_sqr - var / scale
        biased = keep * biased + (1 - keep) * np.array([max(sqr, 0.0), max(var, 1e-6)])
        unbias = keep * unbias + (1 - keep)
        sqr, var = biased / unbias
        gains.append((var + sqr) / (var / scale + sqr))
    return gains


@pytest.mark.parametrize(("count", "scale"), [(2, 2), (4, 4), (4, 2), (8, 8)])
def test_gains_are_those_of_fairscales_formula_where_its_floors_do_not_act(count, scale):
    generator, batch = np.random.default_rng(3), 32
    # Small noise: each step's estimates are positive.
    locals_ = 1 + 0.3 * generator.normal(size=(50, count, 40))
    estimate = NoiseEstimate()
    for step, gain in enumerate(by_fairscale(locals_, scale, 50)):
        parts = locals_[step] / count
        square, noise = mean_and_noise((parts**2).sum(), (parts.sum(0) ** 2).sum(), 1 / count)
        assert min(square, noise) > 0
        estimate.add(square, noise, batch, count)
        assert estimate.gain(batch, batch / scale) == pytest.approx(gain, rel=1e-12)


def test_a_gain_is_between_1_and_the_scale():
    assert NoiseEstimate(variance=0.0, square=2.0, weight=1).gain(32, 8) == 1
    assert NoiseEstimate(variance=1.0, square=0.0, weight=1).gain(32, 8) == 4
    assert NoiseEstimate(variance=1.0, square=-1.0, weight=1).gain(32, 8) == 4
    assert NoiseEstimate(variance=-1.0, square=1.0, weight=1).gain(32, 8) == 1
    assert NoiseEstimate().gain(32, 8) == 1
    # The noise in the base batch equals the mean's square: (1 + 1) / (1/4 + 1).
    assert NoiseEstimate(variance=8.0, square=1.0, weight=1).gain(32, 8) == pytest.approx(2 / 1.25)


def test_clipping_each_step_is_biased_where_noise_dominates():
    """Why floors are applied to averages alone, unlike in FairScale. The numbers are those of docs/adascale.md."""
    mean, _ = known()
    squares, whole, weight = simulated([1] * 4)
    square, _ = mean_and_noise(squares, whole, weight)
    truth = (mean**2).sum()
    assert square.mean() == pytest.approx(truth, abs=4 * square.std() / np.sqrt(TRIALS))
    assert np.maximum(square, 0).mean() > 1.15 * truth
