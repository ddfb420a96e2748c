"""A GPT small enough to check by hand, models made of it, and two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed.cells.run import Ranks
from torch import Tensor

from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize
from gptlite.ops.config import Attention
from gptlite.ops.inputs import IGNORE
from gptlite.ops.select import Ops
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy, Precision, PrecisionConfig, resolve_precision

CPU = torch.device("cpu")
TINY = {
    "num_layers": 2,
    "num_heads": 3,
    "d_model": 24,
    "d_ff": 40,
    "vocab_size": 53,
    "vocab_multiple": 16,
    "sequence_length": 16,
}
MODERN = {
    **{"position": Position.rope, "norm": Norm.rms_norm, "mlp": MLPKind.swiglu, "qk_norm": True, "bias": False},
    **{"num_heads": 4, "kv_heads": 2, "head_dim": 8},
}
VALUES = {"value_residual": True}
CHOICES = [Attention.matmul, Attention.sdpa, Attention.fused_softmax, Attention.fused]


def build(attention: Attention = Attention.matmul, ops: Ops | None = None, **overrides: Any) -> GPT:
    """A GPT with every parameter, biases and norms too, far from its initial value."""
    model = GPT(GPTConfig(**TINY | overrides), ops or Ops(attention), seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def differentiated(model: GPT, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    loss = model(*batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def distances(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Of each tensor, relative, by the norm."""
    pairs = zip(found, wanted, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs]


def policy(precision: str | Precision) -> Policy:
    """What a precision comes to on a CPU."""
    return resolve_precision(PrecisionConfig(Precision(precision)), CPU)


def planned(
    model: GPT, policy: Policy, recompute: str | ActivationCheckpointing = "none", compile: bool = False
) -> Any:
    """The model as one device trains it."""
    config = ParallelismConfig(activation_checkpointing=ActivationCheckpointing(recompute))
    (part,) = parallelize(Model.of(model.config, policy), model, Mesh(CPU), config, policy, compile=compile)
    return part


@pytest.fixture
def tiny() -> Callable[..., GPT]:
    """Builds a randomized GPT."""
    return build


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, targets (a few of them ignored) [4, 13] and the sample numbers."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(TINY["vocab_size"], (4, 14), generator=generator)
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, 9:] = IGNORE
    return tokens, targets, torch.tensor([7, 3, 2**33, 0])


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
