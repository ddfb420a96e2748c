"""Optimizers against their papers' update rules, written out in float64."""

import pytest
import torch
from torch import Tensor, nn

from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig

STEPS = 5


class Toy(nn.Module):
    """One of each: an embedding, a matrix with a bias, a norm, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def gradients_of(shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def optimized(config: OptimizerConfig, start: Tensor) -> Tensor:
    """The parameter after one optimizer step per gradient."""
    parameter = nn.Parameter(start.clone())
    optimizer = build_optimizer(config, [("weight", parameter)])
    for gradient in gradients_of(start.shape):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def adam_by_hand(config: AdamConfig | AdamWConfig, start: Tensor, l2: float, decoupled: float) -> Tensor:
    """Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2."""
    x, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, gradient in enumerate(gradients_of(start.shape), start=1):
        g = gradient.double() + l2 * x
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        m_hat, v_hat = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        x = x - config.lr * m_hat / (v_hat.sqrt() + config.eps) - config.lr * decoupled * x
    return x


def sgd_by_hand(config: SGDConfig, start: Tensor, l2: float) -> Tensor:
    x, velocity = start.double(), torch.zeros_like(start).double()
    for gradient in gradients_of(start.shape):
        g = gradient.double() + l2 * x
        velocity = config.momentum * velocity + g
        x = x - config.lr * (g + config.momentum * velocity if config.nesterov else velocity)
    return x


@pytest.mark.parametrize("shape", [(6, 5), (5,)], ids=["matrix", "vector"])
def test_updates_follow_the_papers(shape):
    """A vector is updated as if the weight decay were 0."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    decay = 0.3 if len(shape) == 2 else 0.0
    adamw = AdamWConfig(lr=0.02, weight_decay=0.3)
    adam = AdamConfig(lr=0.02, weight_decay=0.3, beta2=0.99)
    sgd = SGDConfig(lr=0.02, weight_decay=0.3)
    nesterov = SGDConfig(lr=0.02, weight_decay=0.3, momentum=0.8, nesterov=True)
    expected = [
        (adamw, adam_by_hand(adamw, start, l2=0.0, decoupled=decay)),
        (adam, adam_by_hand(adam, start, l2=decay, decoupled=0.0)),
        (sgd, sgd_by_hand(sgd, start, l2=decay)),
        (nesterov, sgd_by_hand(nesterov, start, l2=decay)),
    ]
    for config, by_hand in expected:
        torch.testing.assert_close(optimized(config, start).double(), by_hand, rtol=1e-5, atol=1e-6, msg=str(config))


def test_matrices_decay_and_vectors_do_not():
    toy = Toy()
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.1), toy.named_parameters())
    assert [(group["names"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (["embedding.weight", "linear.weight"], 0.1),
        (["linear.bias", "norm.weight", "norm.bias"], 0.0),
    ]
    named = dict(toy.named_parameters())
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            assert parameter is named[name]


@pytest.mark.parametrize("config", [AdamWConfig(), AdamConfig(), SGDConfig()])
def test_the_fused_kernel_is_used_on_a_cpu(config):
    optimizer = build_optimizer(config, Toy().named_parameters())
    assert optimizer.defaults["fused"] is True


def test_other_devices_take_the_foreach_kernels():
    optimizer = build_optimizer(AdamWConfig(), Toy().to("meta").named_parameters())
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (None, True)


def test_a_new_class_without_a_builder_is_an_error():
    with pytest.raises(TypeError, match="no builder for OptimizerConfig"):
        build_optimizer(OptimizerConfig(), Toy().named_parameters())
