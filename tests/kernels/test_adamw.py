"""AdamW against its formula in float64."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP32, WIDTHS, each, generator, normal, on, same_bits
from kernels.loop import loop_over
from kernels.options import Adam, State
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["adamw"]


def state_of(size: int, step: int = 0, *seed: object) -> State:
    exp_avg = normal([size], FP32, "m", *seed) * 0.1
    exp_avg_sq = normal([size], FP32, "v", *seed).square() * 0.01
    if step == 0:
        exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    return State(normal([size], FP32, "p", *seed), exp_avg, exp_avg_sq, torch.tensor([float(step)]))


def check_step(before: State, after: State, gradient: Tensor, o: Adam, scale: float | None) -> None:
    """One step in float64, from the header's formula."""
    p, m, v, step = (each.double() for each in (before.parameter, before.exp_avg, before.exp_avg_sq, before.step))
    g = gradient.double() * (1.0 if scale is None else float(torch.tensor(scale)))
    size = g.abs()
    if o.adam:
        g, size = g + o.weight_decay * p, size + o.weight_decay * p.abs()
    m, m_terms = o.beta1 * m + (1 - o.beta1) * g, o.beta1 * m.abs() + (1 - o.beta1) * size
    v, v_terms = o.beta2 * v + (1 - o.beta2) * g**2, o.beta2 * v + (1 - o.beta2) * size**2
    bias1, bias2 = 1 - o.beta1 ** (step + 1), 1 - o.beta2 ** (step + 1)
    denominator = (v / bias2).sqrt() + o.eps
    decay = 0.0 if o.adam else o.weight_decay
    check("exp_avg", after.exp_avg, m, m_terms, TOLERANCE)
    check("exp_avg_sq", after.exp_avg_sq, v, v_terms, TOLERANCE)
    # exp_avg's error, and exp_avg_sq's, which the square root halves: but not where g cancels, hence the quotient.
    quotient = (v_terms / v.clamp(min=1e-300)).nan_to_num(1.0).clamp(min=1.0)
    terms = p.abs() + o.lr * (decay * p.abs() + m_terms / bias1 / denominator * (2 + quotient))
    check("parameter", after.parameter, p - o.lr * (decay * p + m / bias1 / denominator), terms, TOLERANCE)
    assert torch.equal(after.step, before.step + 1)


@each("size,dtype", [(s, d) for s in (*WIDTHS, 50257) for d in DTYPES], [(s, d) for s in (1, 33, 2049) for d in DTYPES])
@loop_over("adam", [False, True])
def test_one_step(backend: Backend, size, dtype, adam) -> None:
    for step, scale, found_inf in ((0, None, None), (1, 0.3, 0.0), (1000, 1e-3, None)):
        before, gradient, options = state_of(size, step), normal([size], dtype, "g"), Adam(adam=adam)
        (after,) = backend.adamw([before], [gradient], options, scale, found_inf, dtype)
        check_step(before, after, gradient, options, scale)


OPTIONS = [
    Adam(lr=0.3, weight_decay=0.0),
    Adam(beta1=0.0, beta2=0.999),
    Adam(beta1=0.99, beta2=0.0),
    Adam(eps=1.0),
    Adam(eps=1e-15, lr=1e-7),
    Adam(weight_decay=10.0),
    Adam(weight_decay=10.0, adam=True),
]


@each("options", OPTIONS, OPTIONS[3:5])
def test_options(backend: Backend, options) -> None:
    for step in (0, 7, 100_000):
        before, gradient = state_of(300, step), normal([300], FP32, "g")
        (after,) = backend.adamw([before], [gradient], options)
        check_step(before, after, gradient, options, None)


@on()
@loop_over("found", [1.0, 0.5, float("inf"), float("nan")])
def test_nothing_changes_where_an_infinity_was_found(backend: Backend, found) -> None:
    states = [
        replace(state_of(size, 3, size), copy=torch.full([size], 0.5, dtype=torch.bfloat16)) for size in (1, 40, 1000)
    ]
    gradients = [torch.full_like(each.parameter, float("nan")) for each in states]
    for before, after in zip(states, backend.adamw(states, gradients, Adam(), 1.0, found), strict=True):
        for name in ("parameter", "exp_avg", "exp_avg_sq", "step", "copy"):
            assert same_bits(getattr(before, name), getattr(after, name))


COPIED = (torch.bfloat16, torch.float16)


@each("size,dtype", [(s, d) for s in (1, 15, 33, 300, 5000) for d in DTYPES], [(33, BF16), (2049, FP32)])
@loop_over("adam", [False, True])
def test_copies_are_what_the_parameters_are_rounded_to(backend: Backend, size, dtype, adam) -> None:
    """Of any alignment, beside parameters without; and all else has the bits it has without copies."""
    sizes = (size, 7, size + 1, 40)
    plain = [state_of(n, 3, n, i) for i, n in enumerate(sizes)]
    gradients = [normal([n], dtype, "g", n) for n in sizes]
    dtypes = (COPIED[0], None, COPIED[1], COPIED[0])
    states = [
        each_ if kind is None else replace(each_, copy=torch.full_like(each_.parameter, float("nan"), dtype=kind))
        for each_, kind in zip(plain, dtypes, strict=True)
    ]
    for offsets in ((0,), (1,), (0, 0, 0, 0, 0, 1)):
        there = backend.having(offsets=offsets)
        after = there.adamw(states, gradients, Adam(adam=adam), 0.5, 0.0, dtype=dtype)
        without = there.adamw(plain, gradients, Adam(adam=adam), 0.5, 0.0, dtype=dtype)
        for with_, other, kind in zip(after, without, dtypes, strict=True):
            for name in ("parameter", "exp_avg", "exp_avg_sq", "step"):
                assert same_bits(getattr(with_, name), getattr(other, name))
            assert (with_.copy is None) is (kind is None)
            if with_.copy is not None:
                assert same_bits(with_.copy, with_.parameter.to(with_.copy.dtype))


@on()
def test_copies_are_rounded_to_even_and_overflow_as_casts_do(backend: Backend) -> None:
    halfway = [1 + odd * unit for unit in (2**-8, 2**-11) for odd in (1, 3)]
    parameter = torch.tensor([*halfway, 65519.9, 65520.0, 3.4e38, -3.4e38, 1e-40, -0.0, 6e-8, 0.0] * 3)
    for kind in COPIED:
        zeros = torch.zeros_like(parameter)
        state = State(parameter, zeros, zeros, torch.tensor([0.0]), torch.full_like(parameter, 9.0, dtype=kind))
        (after,) = backend.adamw([state], [zeros], Adam(weight_decay=0.0))
        assert same_bits(after.parameter, parameter)
        assert after.copy is not None
        assert same_bits(after.copy, parameter.to(kind))


@each("dtype", DTYPES, (BF16,))
def test_hundreds_of_tiny_tensors(backend: Backend, dtype) -> None:
    """Each with a count of steps of its own, some empty: these count, too."""
    count = 150 if backend.is_emulated else 500
    sizes = torch.randint(0, 40, (count,), generator=generator("sizes")).tolist()
    sizes[3] = sizes[4] = 0
    sizes[count // 2] = 2000 if backend.is_emulated else 20_000
    steps = [i % 5 for i in range(count)]
    states = [state_of(size, step, i) for i, (size, step) in enumerate(zip(sizes, steps, strict=True))]
    gradients = [normal([size], dtype, "g", i) for i, size in enumerate(sizes)]
    after = backend.adamw(states, gradients, Adam(), 0.5, 0.0, dtype=dtype)
    assert [each_.step.item() for each_ in after] == [step + 1 for step in steps]
    for step in range(5):  # those of as many steps together
        of = [i for i in range(count) if steps[i] == step]
        check_step(joined(states, of), joined(after, of), torch.cat([gradients[i] for i in of]), Adam(), 0.5)


def joined(states: list[State], of: list[int]) -> State:
    parts = ([getattr(states[i], name) for i in of] for name in ("parameter", "exp_avg", "exp_avg_sq"))
    return State(*(torch.cat(each_) for each_ in parts), states[of[0]].step)


@each("dtype", DTYPES, (BF16,))
@loop_over("adam", [False, True])
def test_a_rate_in_memory_has_the_bits_of_one_that_is_passed(backend: Backend, dtype, adam) -> None:
    for lr in (1e-3 / 3, 0.7, 0.0):
        before, gradient = state_of(300, 7), normal([300], dtype, "g")
        (passed,) = backend.adamw([before], [gradient], Adam(lr=lr, adam=adam), 0.5, dtype=dtype)
        (read,) = backend.adamw([before], [gradient], Adam(lr=9.0, adam=adam), 0.5, dtype=dtype, rate=lr)
        for name in ("parameter", "exp_avg", "exp_avg_sq", "step"):
            assert same_bits(getattr(read, name), getattr(passed, name))


@on()
def test_no_tensors(backend: Backend) -> None:
    assert backend.adamw([], [], Adam()) == []


@on()
def test_what_is_not_finite_stays_in_its_element(backend: Backend) -> None:
    before, gradient = state_of(50, 2), normal([50], FP32, "g")
    gradient[7] = float("nan")
    (after,) = backend.adamw([before], [gradient], Adam())
    for each_ in (after.parameter, after.exp_avg, after.exp_avg_sq):
        assert each_.isnan().nonzero().tolist() == [[7]]
