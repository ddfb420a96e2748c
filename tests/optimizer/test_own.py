"""Optimizers against their papers' update rules, written out in float64, and against torch's."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from gptlite.models.gpt.spec import EDGES
from gptlite.ops.matrices import Matrices
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import (
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    MuonDtype,
    MuonScale,
    NewtonSchulz,
    OptimizerConfig,
    SGDConfig,
)
from gptlite.optimizer.muon import EPS, QUINTIC, Stack, coefficients, newton_schulz
from gptlite.satellites.optimizers.configs import AdafactorConfig, LambConfig, LionConfig

STEPS = 6
SHAPES = [(6, 5), (5, 7), (5,), (1, 5), (2, 3, 4), ()]
EXACT = {"rtol": 0.0, "atol": 1e-6}  # of weights of about 1

Rule = Callable[[Tensor, Iterator[Tensor]], Tensor]


def start_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gradients_of(shape: tuple[int, ...], size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [size * torch.randn(shape, generator=generator) for _ in range(STEPS)]


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def optimized(config: OptimizerConfig, start: Tensor, gradients: list[Tensor], name: str = "weight") -> Tensor:
    parameter = nn.Parameter(start.clone())
    return stepped(
        build_optimizer(config, [(name, parameter)], Matrices(EDGES, {"attn.qkv.weight": (1, (1, 1, 1))})),
        parameter,
        gradients,
    )


def adam(config: AdamConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    """Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2, whose weight decay is apart."""
    decay, decoupled = config.weight_decay if x.ndim > 1 else 0.0, isinstance(config, AdamWConfig)
    x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double() + (0.0 if decoupled else decay) * x
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        m_hat, v_hat = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        x = x - config.lr * m_hat / (v_hat.sqrt() + config.eps) - config.lr * (decay if decoupled else 0.0) * x
    return x


def sgd(config: SGDConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    decay = config.weight_decay if x.ndim > 1 else 0.0
    x, velocity = x.double(), torch.zeros_like(x).double()
    for gradient in gradients:
        g = gradient.double() + decay * x
        velocity = config.momentum * velocity + g
        x = x - config.lr * (g + config.momentum * velocity if config.nesterov else velocity)
    return x


def lamb(config: LambConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    """You et al. 2019, algorithm 2, with phi(z) = z; a vector is not adapted, as in the authors' code."""
    decay = config.weight_decay if x.ndim > 1 else 0.0
    x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        r = (m / (1 - config.beta1**t)) / ((v / (1 - config.beta2**t)).sqrt() + config.eps)
        u = r + decay * x
        trust = (x.norm() / u.norm()).clamp(config.min_trust, config.max_trust)
        x = x - config.lr * (trust if x.ndim > 1 else 1.0) * u
    return x


def lion(config: LionConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    """Chen et al. 2023, program 1."""
    decay = config.weight_decay if x.ndim > 1 else 0.0
    x, m = x.double(), torch.zeros_like(x).double()
    for gradient in gradients:
        g = gradient.double()
        update = torch.sign(config.beta1 * m + (1 - config.beta1) * g)
        x = x - config.lr * (update + decay * x)
        m = config.beta2 * m + (1 - config.beta2) * g
    return x


def adafactor(config: AdafactorConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    """Shazeer and Stern 2018, algorithms 4 and 5, with rho_t = lr and sums in place of means; stacks of matrices."""
    decay = config.weight_decay if x.ndim > 1 else 0.0

    def rms(value: Tensor) -> Tensor:
        return value.square().mean().sqrt()

    x = x.double()
    rows = columns = second = torch.zeros((), dtype=torch.float64)
    for t, gradient in enumerate(gradients, start=1):
        g, beta2 = gradient.double(), 1 - t**-config.decay
        alpha = max(config.eps2, rms(x).item()) * config.lr
        squares = g * g + config.eps1
        if x.ndim > 1:
            rows = beta2 * rows + (1 - beta2) * squares.sum(-1, keepdim=True)
            columns = beta2 * columns + (1 - beta2) * squares.sum(-2, keepdim=True)
            second = rows * columns / rows.sum(-2, keepdim=True)
        else:
            second = beta2 * second + (1 - beta2) * squares
        u = g / second.sqrt()
        u = u / max(1.0, rms(u).item() / config.clip_threshold)
        x = x - config.lr * decay * x - alpha * u
    return x


def quintic(x: Tensor, steps: int) -> Tensor:
    """Jordan's Newton-Schulz, in the dtype given: applied to singular values, it is the polynomial of each."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


FIVE = [QUINTIC] * 5


def muon(config: MuonConfig, x: Tensor, gradients: list[Tensor]) -> Tensor:
    """Jordan et al. 2024, for one matrix."""
    x, buffer = x.double(), torch.zeros_like(x).double()
    rows, columns = x.shape
    match = config.scale is MuonScale.match_rms_adamw
    scale = 0.2 * max(rows, columns) ** 0.5 if match else max(1, rows / columns) ** 0.5
    for gradient in gradients:
        g = gradient.double()
        buffer = config.momentum * buffer + g  # its length does not matter
        update = g + config.momentum * buffer if config.nesterov else buffer
        x = x - config.lr * config.weight_decay * x - config.lr * scale * quintic(update, config.newton_schulz_steps)
    return x


CASES = [
    (AdamWConfig(lr=0.02, weight_decay=0.3), adam),
    (AdamConfig(lr=0.02, weight_decay=0.3, beta2=0.99), adam),
    (SGDConfig(lr=0.02, weight_decay=0.3), sgd),
    (SGDConfig(lr=0.02, weight_decay=0.3, momentum=0.8, nesterov=True), sgd),
    (LambConfig(lr=0.05, weight_decay=0.3), lamb),
    (LambConfig(lr=0.05, weight_decay=0.0, beta1=0.8, beta2=0.95, eps=1e-3), lamb),
    (LambConfig(lr=0.05, min_trust=0.3, max_trust=0.5), lamb),
    (LionConfig(lr=0.02, weight_decay=0.3), lion),
    (AdafactorConfig(lr=0.05), adafactor),
    (AdafactorConfig(lr=0.05, weight_decay=0.3, decay=0.5, clip_threshold=0.7, eps2=2.0), adafactor),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("config", "rule"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_updates_follow_the_papers(config, rule, shape):
    start, gradients = start_of(shape), gradients_of(shape)
    torch.testing.assert_close(optimized(config, start, gradients).double(), rule(config, start, gradients), **EXACT)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e4])
def test_adafactors_and_lambs_steps_do_not_depend_on_the_size_of_the_gradients(size):
    """Not so in torch's Adafactor, whose small number is 1e-7; LAMB's eps is 1e-6."""
    start = start_of((6, 5))
    configs = [(AdafactorConfig(), adafactor)] + ([(LambConfig(), lamb)] if size > 1 else [])
    for config, rule in configs:
        found = optimized(config, start, gradients_of((6, 5), size)).double()
        torch.testing.assert_close(found, rule(config, start, gradients_of((6, 5), 1.0)), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", MuonScale)
@pytest.mark.parametrize("shape", [(6, 5), (5, 7), (9, 2)], ids=str)
def test_muon_follows_its_rule(shape, scale, nesterov):
    config = MuonConfig(lr=0.02, weight_decay=0.3, scale=scale, nesterov=nesterov, momentum=0.9)
    start, gradients = start_of(shape), gradients_of(shape)
    torch.testing.assert_close(optimized(config, start, gradients).double(), muon(config, start, gradients), **EXACT)


def test_newton_schulz_in_fp32_is_within_1e_4_of_float64():
    for shape in ((64, 64), (48, 192), (192, 48), (1, 9)):
        for seed in range(3):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            expected = quintic(x.double(), 5)
            assert (newton_schulz(x, FIVE).double() - expected).abs().max() < 1e-4
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    singular = torch.linalg.svdvals(newton_schulz(x, FIVE))
    assert 0.6 < singular.min() < singular.max() < 1.3  # "between 0.7 and 1.2", of values not too small
    assert not newton_schulz(torch.zeros(3, 4), FIVE).any()


@pytest.mark.parametrize(("steps", "low", "high"), [(5, 0.85, 1.15), (8, 0.999, 1.001)])
def test_polar_express_brings_singular_values_near_1(steps, low, high):
    values = torch.logspace(-3, 0, 1000, dtype=torch.float64)
    config = MuonConfig(newton_schulz=NewtonSchulz.polar_express, newton_schulz_steps=steps)
    for a, b, c in coefficients(config):
        values = a * values + b * values**3 + c * values**5
    assert low < values.min() < values.max() < high


def test_polar_express_is_nearer_to_orthogonal_in_as_many_steps():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    quintics, polar = (
        (newton_schulz(x, coefficients(MuonConfig(newton_schulz=kind))) - u @ v).norm() for kind in NewtonSchulz
    )
    assert polar < 0.7 * quintics


@pytest.mark.parametrize("shape", [(64, 64), (96, 256), (256, 96)])
def test_newton_schulz_in_bf16_is_as_near_to_float64_as_torchs(shape):
    """Sums rounded outside of the products are twice as far from it."""
    ours, theirs = [], []
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        expected = newton_schulz(x.double(), FIVE)
        torchs = _zeropower_via_newtonschulz(x.float(), QUINTIC, 5, EPS)
        for found, errors in ((newton_schulz(x, FIVE), ours), (torchs, theirs)):
            errors.append(((found.double() - expected).norm() / expected.norm()).item())
    assert max(ours) < 0.02
    assert sum(ours) < 1.1 * sum(theirs)


@pytest.mark.parametrize("scale", MuonScale)
def test_torchs_muon_takes_the_same_steps_in_bf16(scale):
    start, gradients = start_of((6, 5)), gradients_of((6, 5))
    theirs = nn.Parameter(start.clone())
    options = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "adjust_lr_fn": scale.value}
    expected = stepped(torch.optim.Muon([theirs], **options), theirs, gradients)
    config = MuonConfig(lr=0.02, weight_decay=0.3, momentum=0.9, scale=scale, newton_schulz_dtype=MuonDtype.bf16)
    found = optimized(config, start, gradients)
    assert (found - expected).norm() < 5 * 2**-8 * (expected - start).norm()  # five roundings to 8 bits


@pytest.mark.parametrize("name", ["token_embedding.weight", "position_embedding.weight", "head.weight", "a.bias"])
def test_muon_leaves_embeddings_the_head_and_vectors_to_adamw(name):
    shape = (5,) if name == "a.bias" else (6, 5)
    start, gradients = start_of(shape), gradients_of(shape)
    config = MuonConfig(lr=0.04, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3, adamw_lr_ratio=0.5)
    adamw = AdamWConfig(lr=0.02, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3)
    assert torch.equal(optimized(config, start, gradients, name), optimized(adamw, start, gradients, name))


def test_muon_takes_q_k_and_v_apart():
    """3 heads of 2: rows q0 q0 k0 k0 v0 v0 q1 ..."""
    heads, width = 3, 6
    start, gradients = start_of((3 * width, width)), gradients_of((3 * width, width))
    config = MuonConfig(lr=0.02)
    parameter = nn.Parameter(start.clone())
    optimizer = build_optimizer(
        config, [("layers.0.attn.qkv.weight", parameter)], Matrices(fused={"attn.qkv.weight": (heads, (1, 1, 1))})
    )
    found = stepped(optimizer, parameter, gradients)
    for place in range(3):
        rows = [6 * head + 2 * place + row for head in range(heads) for row in range(2)]
        alone = optimized(config, start[rows], [gradient[rows] for gradient in gradients])
        torch.testing.assert_close(found[rows], alone, **EXACT)


def test_a_stack_is_views_of_its_matrices():
    """2 groups of 2 rows of queries, 1 of keys, 1 of values, times 2 rows."""
    stacked = torch.arange(64.0).view(16, 4)
    queries, keys, values = Stack(groups=2, sizes=(2, 1, 1)).matrices(stacked)
    assert (queries.shape, keys.shape) == ((2, 4, 4), (2, 2, 4))
    assert torch.equal(queries[1], stacked[8:12])
    values.zero_()
    assert not stacked[[6, 7, 14, 15]].any()


def test_muon_computes_matrices_of_equal_shape_together(monkeypatch):
    """Tall ones transposed: seven of 6 x 6 (q, k, v and one more, twice, less one), two of 6 x 24."""
    shapes = []

    def counted(x, steps):
        shapes.append(tuple(x.shape))
        return newton_schulz(x, steps)

    monkeypatch.setattr("gptlite.optimizer.muon.newton_schulz", counted)
    sizes = {"0.attn.qkv.weight": (18, 6), "1.attn.qkv.weight": (18, 6), "proj": (6, 6), "up": (24, 6), "down": (6, 24)}
    named = [(name, nn.Parameter(start_of(shape))) for name, shape in sizes.items()]
    optimizer = build_optimizer(MuonConfig(lr=0.02), named, Matrices(fused={"attn.qkv.weight": (1, (1, 1, 1))}))
    for _, parameter in named:
        parameter.grad = gradients_of(parameter.shape)[0]
    optimizer.step()
    assert sorted(shapes) == [(2, 6, 24), (7, 6, 6)]
    for name, parameter in named[2:]:
        alone = optimized(MuonConfig(lr=0.02), start_of(sizes[name]), gradients_of(sizes[name])[:1])
        torch.testing.assert_close(parameter.detach(), alone, **EXACT)


def test_muon_takes_grouped_queries_apart():
    """2 heads of keys of width 3 with 2 queries each: rows q00 q01 k0 v0 q10 q11 k1 v1, three of each."""
    start, gradients = start_of((24, 6)), gradients_of((24, 6))
    config, parameter = MuonConfig(lr=0.02), nn.Parameter(start.clone())
    optimizer = build_optimizer(
        config, [("attn.qkv.weight", parameter)], Matrices(fused={"attn.qkv.weight": (2, (2, 1, 1))})
    )
    found = stepped(optimizer, parameter, gradients)
    for places in ((0, 1), (2,), (3,)):
        rows = [12 * head + 3 * place + row for head in range(2) for place in places for row in range(3)]
        alone = optimized(config, start[rows], [gradient[rows] for gradient in gradients])
        torch.testing.assert_close(found[rows], alone, **EXACT)


@pytest.mark.parametrize("config", [LambConfig(), LionConfig(), MuonConfig(), AdafactorConfig()], ids=str)
def test_no_gradient_leaves_a_parameter_and_zeros_do_no_harm(config):
    parameters = {
        "a": nn.Parameter(start_of((6, 5))),
        "b": nn.Parameter(torch.zeros(6, 5)),
        "c.bias": nn.Parameter(torch.ones(5)),
    }
    optimizer = build_optimizer(config, parameters.items())
    before = parameters["a"].detach().clone()
    for _ in range(2):
        parameters["b"].grad, parameters["c.bias"].grad = torch.zeros(6, 5), torch.zeros(5)
        optimizer.step()
    assert torch.equal(parameters["a"], before)
    assert not parameters["b"].any()
    assert torch.equal(parameters["c.bias"], torch.ones(5))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [LambConfig(), LionConfig(), MuonConfig(), AdafactorConfig()], ids=str)
def test_a_graph_that_kept_the_weights_is_told(config):
    parameter = nn.Parameter(start_of((6, 5)))
    optimizer = build_optimizer(config, [("a", parameter)])
    loss = parameter.square().sum()
    parameter.grad = torch.ones(6, 5)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
