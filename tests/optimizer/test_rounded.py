"""bf16 parameters without masters: rounding is unbiased, the same for any piece, and small steps are taken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gptlite.config import load
from gptlite.config.checks import check
from gptlite.errors import ConfigError
from gptlite.optimizer import rounded
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig
from gptlite.optimizer.rounded import RoundedOptimizer, round_box_, set_step
from gptlite.optimizer.state import optimizer_state, take_optimizer_state
from gptlite.satellites.optimizers.configs import LionConfig
from gptlite.satellites.optimizers.lion import Lion

BF16_STOCHASTIC = "precision=bf16_stochastic"


def drawn(values: Tensor, step: int = 0, seed: int = 1, name: str = "w") -> Tensor:
    """The values as bf16, of a parameter of their shape."""
    parameter = torch.zeros(values.shape, dtype=torch.bfloat16)
    round_box_(parameter, values, seed, step, name)
    return parameter


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 number towards zero, and the next away from it, by the format: 8 bits from the leading one on."""
    exponent = values.abs().double().log2().floor()
    unit = 2.0 ** (exponent - 7)
    below = (values.double() / unit).trunc() * unit
    return below, below + values.double().sign() * unit


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 3e4])
def test_the_mean_of_many_draws_is_the_value(scale: float):
    torch.manual_seed(0)
    values = torch.randn(300) * scale
    below, above = neighbours(values)
    total, rows, steps = torch.zeros(300, dtype=torch.float64), 500, 4
    for step in range(steps):
        found = drawn(values.repeat(rows, 1), step).double()
        assert ((found == below) | (found == above)).all()
        total += found.sum(0)
    steps *= rows
    gap = (above - below).abs()
    chance = (values.double() - below).abs() / gap
    spread = gap * (chance * (1 - chance) / steps).sqrt()
    assert ((total / steps - values).abs() <= 5 * spread + 1e-12 * gap).all()
    assert abs(((total / steps - values) / gap).mean()) < 4 * 0.41 / math.sqrt(300 * steps)


def test_what_bf16_holds_is_kept_and_so_are_infinities():
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(drawn(exact.float(), 3), exact)
    odd = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-45])
    assert torch.equal(drawn(odd)[:4].float(), odd[:4])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert all(drawn(nans, step).isnan().all() for step in range(20))


def test_seed_name_and_step_change_the_draws_and_nothing_else_does():
    values = torch.rand(40, 33)
    first = drawn(values)
    assert torch.equal(first, drawn(values))
    for other in (drawn(values, step=1), drawn(values, seed=2), drawn(values, name="v"), drawn(values, step=2**32)):
        assert 0.2 < (first != other).float().mean() < 0.5  # of a uniform chance p, 2 p (1 - p): a third


@pytest.mark.parametrize("shape", [(7, 29), (64, 16), (1, 5), (3, 410), (53,), (0, 8), (5, 6, 7), (3, 5, 4, 6)])
def test_a_piece_is_rounded_as_within_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Boxes of rows and columns as tensor parallelism and ZeRO cut them, and blocks drawn at a time."""
    values = torch.rand(shape) + 0.5
    whole = drawn(values)
    for block in (3, 64, 2**18):
        monkeypatch.setattr(rounded, "BLOCK", block)
        assert torch.equal(drawn(values), whole)
    boxes = [
        tuple(slice(size // 3, size - size // 4) for size in shape),
        tuple(slice(size // 2, size) for size in shape),
    ]
    for box in boxes:
        found, local = torch.zeros_like(whole), values[box].clone()
        starts = tuple(part.start for part in box)
        monkeypatch.setattr(rounded, "local_box", lambda _, local=local, starts=starts: (tuple(local.shape), starts))
        piece = torch.zeros_like(whole[box])
        monkeypatch.setattr(rounded, "local_tensor", lambda _, piece=piece: piece)
        round_box_(found, local, 1, 0, "w")
        assert torch.equal(piece, whole[box])


class Small:
    """A weight of 1 that an optimizer moves by steps far below bf16's spacing there, 2^-8 below 1."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        self.weight.grad_dtype = torch.float32
        self.optimizer = RoundedOptimizer(build_optimizer(config, [("w", self.weight)]), seed=0)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.weight.grad = torch.full((4096,), 0.5)
            set_step(self.optimizer, step)
            self.optimizer.step()


CONFIGS = [AdamWConfig, AdamConfig, SGDConfig, LionConfig]


@pytest.mark.parametrize("kind", CONFIGS)
def test_steps_too_small_for_bf16_are_taken_on_average_where_rounding_to_nearest_stalls(kind: type[OptimizerConfig]):
    config = kind(lr=1e-4, weight_decay=0.0)
    if isinstance(config, SGDConfig):
        config = replace(config, momentum=0.5)
    small = Small(config)
    wide = nn.Parameter(torch.ones(4096))
    reference = build_optimizer(config, [("w", wide)])
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(100):
        before = wide.detach().clone()
        wide.grad = torch.full((4096,), 0.5)
        reference.step()
        nearest = (nearest.float() + (wide.detach() - before)).bfloat16()
        small.train(step, step + 1)
    moved = 1 - wide.detach().mean().item()
    assert moved > 0.004
    assert torch.equal(nearest, torch.ones(4096, dtype=torch.bfloat16))
    assert 1 - small.weight.detach().double().mean().item() == pytest.approx(moved, rel=0.05)


@pytest.mark.parametrize("kind", CONFIGS)
def test_state_is_fp32_and_a_resumed_run_goes_on_to_the_bit(kind: type[OptimizerConfig]):
    unbroken, first, second = (Small(kind(lr=1e-2)) for _ in range(3))
    unbroken.train(0, 8)
    first.train(0, 4)
    tensors = optimizer_state(second.optimizer)
    for key, value in tensors.items():
        assert value.dtype == torch.float32
        value.copy_(optimizer_state(first.optimizer)[key])
    take_optimizer_state(second.optimizer, tensors)
    second.weight.data.copy_(first.weight.data)
    second.train(4, 8)
    assert torch.equal(second.weight, unbroken.weight)


class Scaled(Lion):
    """A rule with an attribute, as an optimizer of one's own may have."""

    def __init__(self, groups: list[dict[str, Any]], factor: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": (0.95, 0.98), "weight_decay": 0.0})
        self.factor = factor

    def update(self) -> None:
        for group in self.param_groups:
            group["lr"] = self.factor
        super().update()


def test_a_rule_keeps_its_attributes_and_hooks_run_once_in_a_step():
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(8)
    optimizer = RoundedOptimizer(Scaled([{"params": [weight], "names": ["w"]}], factor=0.5), seed=0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(weight.detach().clone()))
    optimizer.step()
    assert [call.tolist() for call in calls] == [[0.5] * 8]
    assert optimizer.param_groups[0]["params"] == [weight]
    assert optimizer_state(optimizer)["optim.w.exp_avg"].shape == (8,)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("precision=fp16 precision.master_weights=false", "precision.master_weights=false"),
        ("precision=auto precision.master_weights=false", "precision=bf16_stochastic"),
        (f"{BF16_STOCHASTIC} optimizer=muon", "optimizer=muon"),
        (f"{BF16_STOCHASTIC} optimizer=apex_adam", ""),
        (f"{BF16_STOCHASTIC} parallelism=zero_infinity parallelism.offload_path=/tmp/x", "parallelism.offload=nvme"),
        (f"{BF16_STOCHASTIC} parallelism.pipeline=2 parallelism.schedule=zbv", "parallelism.schedule=zbv"),
    ],
)
def test_what_cannot_work_is_one_line(overrides: str, words: str):
    with pytest.raises(ConfigError) as caught:
        check(load(overrides.split()))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_state_is_not_taken_by_torch_s_rules():
    """They round it to the parameters' dtype, and replace the tensors that the rule holds."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RoundedOptimizer(build_optimizer(AdamWConfig(), [("w", weight)]), seed=0)
    with pytest.raises(NotImplementedError, match="optimizer_state"):
        optimizer.load_state_dict(optimizer.state_dict())
