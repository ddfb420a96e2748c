"""1-bit Adam, 1-bit LAMB and 0/1 Adam of W workers in float64, in numpy, written from the papers, but with momenta in
units of the update, that is over floored roots of the second moments.

Worker i has a gradient g_i of the sum over all workers. Values are cut into blocks of 1024, of which each parameter
begins one, and the blocks into as many chunks as there are workers, which is all that the messages depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from compressed.simulation import Workers
from numpy.typing import NDArray

Array = NDArray[np.float64]
WIDTH = 1024


@dataclass
class Rule:
    """Settings of an optimizer; those of LAMB, if `lamb`."""

    lr: float
    decay: float  # of matrices
    beta1: float
    beta2: float
    eps: float
    clip: float
    dense: list[int]  # steps with dense sums, from 1
    lamb: bool = False
    coeff_beta: float = 0.9
    bounds: tuple[float, float] = (0.5, 4.0)
    threshold: float = 0.1

    def factor(self, norm: float) -> float:
        """What gradients of this norm are multiplied by."""
        return min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0


def norm_of(gradients: list[dict[str, Array]], dense: bool) -> float:
    """The norm that all vectors of a step are clipped by: of the sum, or else the root mean square of W g_i."""
    if dense:
        return float(np.sqrt(sum(np.square(sum(each[name] for each in gradients)).sum() for name in gradients[0])))
    squares = sum(np.square(g).sum() for each in gradients for g in each.values())
    return float(np.sqrt(len(gradients) * squares))


@dataclass
class Walk:
    """A worker's parameters, momentum, and the sum of its steps since the last exchange."""

    x: Array
    m: Array
    u: Array


@dataclass
class Simulation:
    """Parameters `x` by name, all of one vector, and their states."""

    rule: Rule
    workers: int
    x: dict[str, Array]
    step: int = 0
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    exchanged: Workers | None = None
    walks: list[dict[str, Walk]] = field(default_factory=list)  # of each worker since the last exchange
    rates: dict[str, float] = field(default_factory=dict)
    count: int = 0
    means: dict[str, float] = field(default_factory=dict)  # of the whole v, if `x` has slices of parameters

    def __post_init__(self) -> None:
        zeros = {name: np.zeros(x.shape) for name, x in self.x.items()}
        self.state = {
            name: {"m": zero.copy(), "v": zero.copy(), "fresh": zero.copy(), "trust": 0.0, "factor": 1.0}
            for name, zero in zeros.items()
        }

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        used = sum(-(-x.size // WIDTH) for x in self.x.values())
        return -(-used // self.workers)

    def take(self, gradients: list[dict[str, Array]], lr: float, norm: float) -> None:
        """One step by the gradients of each worker, clipped by a `norm` of all vectors."""
        self.step += 1
        dense = self.step in self.rule.dense
        summed = {name: sum(each[name] for each in gradients) for name in self.x}
        factor = self.rule.factor(norm)
        if dense:
            self._dense({name: g * factor for name, g in summed.items()}, lr)
        else:
            self._exchange([{name: g * factor for name, g in each.items()} for each in gradients], lr)

    def _dense(self, gradients: dict[str, Array], lr: float) -> None:
        rule = self.rule
        for name, g in gradients.items():
            state = self.state[name]
            state["m"] = rule.beta1 * state["m"] + (1 - rule.beta1) * g
            state["v"] = rule.beta2 * state["v"] + (1 - rule.beta2) * g * g
            update = self._update(name)
            decay = rule.decay if g.ndim > 1 else 0.0
            update = update + decay * self.x[name]
            ratio = 1.0
            if rule.lamb and g.ndim > 1:
                size, length = np.linalg.norm(self.x[name]), np.linalg.norm(update)
                ratio = size / length if size > 0 and length > 0 else 1.0
                state["trust"] = rule.coeff_beta * state["trust"] + (1 - rule.coeff_beta) * ratio
            self.x[name] = self.x[name] - lr * ratio * update

    def _update(self, name: str) -> Array:
        rule, state = self.rule, self.state[name]
        refreshed = sum(step <= self.step for step in rule.dense)
        roots = np.sqrt(state["v"]) if self.step in rule.dense else self.roots(name)
        roots = roots / np.sqrt(1 - rule.beta2**refreshed) + rule.eps
        return state["m"] / (1 - rule.beta1**self.step) / roots

    def _exchange(self, gradients: list[dict[str, Array]], lr: float) -> None:
        rule, former = self.rule, {name: state["m"] for name, state in self.state.items()}
        keep = {name: state["v"] > 0 for name, state in self.state.items()}
        if self.exchanged is None:
            self.exchanged = Workers("sign", self.workers, self.blocks, WIDTH)
            for state in self.state.values():
                state["fresh"] = state["v"]
        former = {name: m * keep[name] for name, m in former.items()}
        roots = {name: self.roots(name) for name in self.state}
        sent = [
            {
                n: keep[n] / roots[n] * (rule.beta1 * former[n] / self.workers + (1 - rule.beta1) * each[n])
                for n in self.x
            }
            for each in gradients
        ]
        values = np.stack([self._packed(each) for each in sent])
        sums = self.exchanged.all_reduce(values, self._packed(keep) > 0)
        for name, m in self._unpacked(sums).items():
            self.state[name]["m"] = m * roots[name]
        for name, x in self.x.items():
            update = self._update(name)
            decayed = update + (rule.decay if x.ndim > 1 else 0.0) * x
            self.x[name] = (
                x - lr * (self._coefficient(name, former[name], update, decayed) if rule.lamb else 1) * decayed
            )

    def _coefficient(self, name: str, former: Array, update: Array, decayed: Array) -> float:
        rule, state = self.rule, self.state[name]
        g = (state["m"] - rule.beta1 * former) / (1 - rule.beta1)
        state["fresh"] = rule.beta2 * state["fresh"] + (1 - rule.beta2) * g * g
        last = rule.dense[-1]
        frozen = self.roots(name) / np.sqrt(1 - rule.beta2**last) + rule.eps
        fresh = np.sqrt(state["fresh"] / (1 - rule.beta2**self.step)) + rule.eps
        factor = (frozen / fresh)[state["m"] != 0].max()
        share = min(1.0, float(np.linalg.norm(update) / np.linalg.norm(decayed)))
        factor = float(np.clip(factor * share + 1 - share, *rule.bounds))
        before = state["factor"]
        state["factor"] = float(np.clip(factor, before * (1 - rule.threshold), before * (1 + rule.threshold)))
        trust = state["trust"] / (1 - rule.coeff_beta**last) if update.ndim > 1 else 1.0
        return trust * state["factor"]

    def alone(self, gradients: list[dict[str, Array]], lr: float, norm: float) -> None:
        """One step of each worker by its own gradients, without an exchange."""
        self.step += 1
        rule, factor = self.rule, self.rule.factor(norm)
        rate = lr / (1 - rule.beta1**self.step)
        if not self.walks:
            zeros = {name: np.zeros_like(x) for name, x in self.x.items()}
            self.walks = [
                {name: Walk(self.x[name], self.state[name]["m"], zero) for name, zero in zeros.items()}
                for _ in range(self.workers)
            ]
            self.rates, self.count = dict.fromkeys(self.x, 0.0), 0
        self.count += 1
        for name, x in self.x.items():
            keep, used = 1 - lr * (rule.decay if x.ndim > 1 else 0.0), self.state[name]["v"] > 0
            self.x[name] = x * keep
            self.rates[name] = self.rates[name] * keep + rate
            for each, walks in zip(gradients, self.walks, strict=True):
                walk = walks[name]
                walk.m = used * (rule.beta1 * walk.m + (1 - rule.beta1) * self.workers * factor * each[name])
                walk.x = walk.x * keep - rate * walk.m / self._below(name)
                walk.u = walk.u * keep + rate * walk.m

    def sent(self) -> list[dict[str, Array]]:
        """What each worker has to send after steps alone, before signs: k u / (W sum of rates), in units of the
        update."""
        scale = {name: self.count / (rate * self.workers) for name, rate in self.rates.items()}
        return [{name: walk.u * scale[name] / self.roots(name) for name, walk in each.items()} for each in self.walks]

    def meet(self) -> None:
        """The exchange after steps alone."""
        assert self.exchanged is not None
        keep = {name: state["v"] > 0 for name, state in self.state.items()}
        values = np.stack([self._packed(each) for each in self.sent()])
        for name, total in self._unpacked(self.exchanged.all_reduce(values, self._packed(keep) > 0)).items():
            self.state[name]["m"] = total * self.roots(name) / self.count
            self.x[name] = self.x[name] - self.rates[name] * self.state[name]["m"] / self._below(name)
        self.walks = []

    def _below(self, name: str) -> Array:
        return self.roots(name) / np.sqrt(1 - self.rule.beta2 ** len(self.rule.dense)) + self.rule.eps

    def roots(self, name: str) -> Array:
        """Roots of second moments in steps with an exchange."""
        v = self.state[name]["v"]
        return floored(v, self.means.get(name, mean_of(v)))

    def errors(self) -> list[dict[str, Array]]:
        """The errors that each worker keeps, by name."""
        assert self.exchanged is not None
        return [self._unpacked(each) for each in self.exchanged.errors]

    def set_errors(self, errors: list[dict[str, Array]]) -> None:
        """Replaces the errors of all workers."""
        assert self.exchanged is not None
        named = [{name: each[name] for name in self.x} for each in errors]
        self.exchanged.errors = np.stack([self._packed(each) for each in named])

    def _packed(self, values: dict[str, Array]) -> Array:
        flat = np.zeros(self.workers * self.blocks * WIDTH)
        start = 0
        for value in values.values():
            flat[start : start + value.size] = value.ravel()
            start += -(-value.size // WIDTH) * WIDTH
        return flat.reshape(self.workers, self.blocks, WIDTH)

    def _unpacked(self, blocks: Array) -> dict[str, Array]:
        flat, start, parts = blocks.ravel(), 0, {}
        for name, x in self.x.items():
            parts[name] = flat[start : start + x.size].reshape(x.shape)
            start += -(-x.size // WIDTH) * WIDTH
        return parts


def floored(v: Array, mean: float) -> Array:
    """Roots, of which the least is a hundredth of the root mean square; `mean` is that of the whole parameter's v."""
    return np.maximum(np.sqrt(v), max(0.01 * np.sqrt(mean), 1e-300))  # not 0, where all of v is


def mean_of(v: Array) -> float:
    """Mean without zeros."""
    return float(v.sum() / max(1, np.count_nonzero(v)))
