"""Which parameters decay, and which of torch's kernels steps them."""

import pytest
import torch
from torch import nn

from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig


class Toy(nn.Module):
    """One of each: an embedding, a matrix with a bias, a norm, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


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
