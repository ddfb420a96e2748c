"""8-bit AdamW: its state goes to fp32 and back to the bit, its steps are torchao's, and what lacks is one line.

torchao is in the `dev` extra: without it these tests fail, they do not skip.
"""

import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import without_plots
from torch import Tensor, nn

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamWConfig
from gptlite.optimizer.state import optimizer_state, take_optimizer_state
from gptlite.satellites.monitor.model_state import state_of, storage_sizes
from gptlite.satellites.optimizers import torchao
from gptlite.satellites.optimizers.adamw_8bit import AdamW8bit
from gptlite.satellites.optimizers.configs import AdamW8bitConfig
from gptlite.satellites.plan.optimizers import CODES_8BIT, state_in_8_bits

SHAPES = {"w": (300, 256), "small": (64, 64), "odd": (70, 60), "bias": (5000,), "few": (15, 256)}
IN_8_BITS = {"w", "small"}
RUN = ("optimizer=adamw_8bit", "model.d_model=64", "optimizer.lr=3e-3")


class Run:
    """Parameters, and an optimizer of them; step `n` has the same gradients in every run."""

    def __init__(self, kind: type[AdamWConfig] | type[AdamW8bitConfig]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = {k: nn.Parameter(torch.randn(v, generator=generator)) for k, v in SHAPES.items()}
        self.optimizer = build_optimizer(kind(lr=1e-2), self.parameters.items())

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step + 100)
            for parameter in self.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.5
            self.optimizer.step()

    def take(self, other: "Run") -> None:
        """As a checkpoint is read."""
        tensors, saved = optimizer_state(self.optimizer), optimizer_state(other.optimizer)
        assert tensors.keys() == saved.keys()
        for key, tensor in tensors.items():
            assert tensor.dtype == torch.float32
            tensor.copy_(saved[key])
        take_optimizer_state(self.optimizer, tensors)
        for key, parameter in self.parameters.items():
            parameter.data.copy_(other.parameters[key].data)


def test_a_resumed_run_goes_on_to_the_bit():
    unbroken, first, second = (Run(AdamW8bitConfig) for _ in range(3))
    unbroken.train(0, 8)
    first.train(0, 4)
    second.take(first)
    second.train(4, 8)
    for key in SHAPES:
        assert torch.equal(second.parameters[key], unbroken.parameters[key])
    eight = {key for key, p in first.parameters.items() if type(first.optimizer.state[p]["exp_avg"]) is not Tensor}
    assert eight == IN_8_BITS


def blocks() -> Tensor:
    """[n, 256] moments of all sorts: signed, with a largest that is negative, tiny, huge, of one element, of zeros."""
    torch.manual_seed(0)
    rows = [torch.randn(400, 256), -torch.rand(100, 256), torch.randn(100, 256).pow(9), torch.zeros(8, 256)]
    rows += [torch.randn(50, 256) * scale for scale in (1e-30, 1e-13, 1e-12, 1e-11, 1e30)]
    rows += [torch.eye(256)[:50] * -3.7]
    return torch.cat(rows)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_to_fp32_and_back_changes_no_code_and_no_scale(key: str):
    values = blocks() if key == "exp_avg" else blocks().square().clamp(max=1e36)
    parameter = nn.Parameter(torch.zeros_like(values))
    optimizer = build_optimizer(AdamW8bitConfig(), [("w", parameter)])
    assert isinstance(optimizer, AdamW8bit)
    moment: Any = optimizer.state_of(parameter)[key]
    moment.copy_(values)
    codes, scale = moment.codes.clone(), moment.scale.clone()
    stored = optimizer.stored(parameter)
    largest = values.abs().amax(1, keepdim=True)
    assert ((stored[key] - values).abs() <= 0.07 * largest.clamp(min=1e-12)).all()
    optimizer.take(parameter, stored)
    assert torch.equal(moment.codes, codes)
    assert torch.equal(moment.scale, scale)


def test_to_and_from_fp32_moments():
    wide, narrow, back = Run(AdamWConfig), Run(AdamW8bitConfig), Run(AdamWConfig)
    wide.train(0, 5)
    narrow.take(wide)
    back.take(narrow)
    for key, value in optimizer_state(wide.optimizer).items():
        found = optimizer_state(back.optimizer)[key]
        if key.split(".")[1] in IN_8_BITS and not key.endswith("step"):
            assert 0 < (found - value).abs().max() < 0.07 * value.abs().max()
        else:
            assert torch.equal(found, value)


def test_steps_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch):
    """Not to the bit: the largest of a block, where it is negative, is 0.7% too small there."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    from torchao.optim import AdamW8bit as Theirs

    ours, theirs, wide = Run(AdamW8bitConfig), Run(AdamW8bitConfig), Run(AdamWConfig)
    groups = [{k: v for k, v in group.items() if k != "names"} for group in ours.optimizer.param_groups]
    for group, its in zip(groups, theirs.optimizer.param_groups, strict=True):
        group["params"], group["lr"] = its["params"], 1e-2
    theirs.optimizer = Theirs(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for each in (ours, theirs, wide):
        each.train(0, 10)
    for key in SHAPES:
        found, expected, exact = (each.parameters[key].detach() for each in (ours, theirs, wide))
        if key not in IN_8_BITS:
            assert torch.equal(found, expected)
            continue
        far = (expected - exact).abs().mean()
        assert (found - expected).abs().mean() < far / 2
        assert (found - exact).abs().mean() < 1.05 * far < 1e-2  # less than one step's length of ten


def test_the_plan_knows_its_bytes():
    run = Run(AdamW8bitConfig)
    run.train(0, 1)
    sizes = [state_in_8_bits(parameter.numel()) for parameter in run.parameters.values()]
    assert sum(storage_sizes(state_of(run.optimizer)).values()) == sum(sizes) + 2 * 4 * CODES_8BIT


@pytest.mark.slow
def test_a_run_goes_on_with_fp32_moments_and_back(run, tmp_path: Path):
    for optimizer, step in (("adamw_8bit", 3), ("adamw", 4), ("adamw_8bit", 5)):
        with without_plots():
            code, _ = run("cut", *RUN, f"optimizer={optimizer}", f"trainer.max_steps={step}")
        assert code == 0
    assert "optimizer=adamw (was adamw_8bit)" in (tmp_path / "cut" / "train.log").read_text()


@pytest.mark.parametrize(
    ("found", "version", "words"),
    [
        (None, "", "torchao is not installed; pip install 'torchao>=0.18', or use optimizer=adamw"),
        ([], "0.9.0", "torchao 0.9.0 is older than 0.18"),
        ([], "", "its version is not known"),
        ([], "0.99.0", "torchao 0.99.0 has no optim/subclass_8bit.py"),
    ],
    ids=["none", "old", "unknown", "moved"],
)
def test_what_lacks_is_one_line(found, version, words, monkeypatch: pytest.MonkeyPatch):
    def version_of(_: str) -> str:
        if version:
            return version
        raise PackageNotFoundError

    spec = None if found is None else types.SimpleNamespace(origin="/x", submodule_search_locations=found)
    monkeypatch.setattr(torchao, "find_spec", lambda _: spec)
    monkeypatch.setattr(torchao, "version", version_of)
    with pytest.raises(ConfigError) as caught:
        load(["optimizer=adamw_8bit"])
    assert words in str(caught.value)
    assert str(caught.value).startswith("optimizer=adamw_8bit: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more", ["parallelism=zero_infinity parallelism.offload_path=/tmp/x", "precision=bf16_stochastic"]
)
def test_what_steps_pieces_refuses_it(more: str):
    with pytest.raises(ConfigError, match="optimizer=adamw_8bit does not allow"):
        load(["optimizer=adamw_8bit", *more.split()])
