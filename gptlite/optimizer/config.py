"""Configuration of optimizers."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from gptlite.errors import ConfigError


def require(legal: bool, key: str, value: object, fix: str) -> None:
    """Raise ConfigError with the key, its value and the fix, unless the value is legal."""
    if not legal:
        raise ConfigError(f"{key}={'null' if value is None else value} {fix}")


class Range(NamedTuple):
    """Legal values of a setting, and the end of the error message for other values."""

    legal: Callable[[float], bool]
    fix: str


def positive(value: float) -> bool:
    """Return True for a number above 0 and below infinity."""
    return 0 < value < math.inf


def not_negative(value: float) -> bool:
    """Return True for 0 and for finite numbers above it."""
    return 0 <= value < math.inf


def _decay_rate(example: float) -> Range:
    return Range(lambda value: 0 <= value < 1, f"must be in [0, 1), e.g. {example}")


MOMENTUM = {"momentum": _decay_rate(0.9)}
BETAS = {"beta1": _decay_rate(0.9), "beta2": _decay_rate(0.95)}
BETAS_AND_EPS = {**BETAS, "eps": Range(positive, "must be above 0, e.g. 1e-8")}


@dataclass
class OptimizerConfig:
    """Fields common to all optimizers. Biases and norms have no weight decay; `clip_norm: 0` turns clipping off.

    rule: the module whose `build(config, context)` creates the optimizer (`build.py`). moments: the number of fp32
    state values per parameter element that every configuration of the optimizer keeps. counts: True if each parameter
    has a step count. elementwise: True if each element is updated from its own gradient and state alone, so that any
    piece of a parameter can be updated separately. adam_kernel: True if our kernel updates (some of) its parameters.
    ranges: legal values of the settings.
    """

    rule: ClassVar[str] = "gptlite.optimizer.torch_rules"
    moments: ClassVar[int] = 2
    counts: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    adam_kernel: ClassVar[bool] = False
    ranges: ClassVar[dict[str, Range]] = {
        "lr": Range(positive, "must be above 0 and finite, e.g. optimizer.lr=6e-4"),
        "weight_decay": Range(not_negative, "must be 0 or more"),
        "clip_norm": Range(not_negative, "must be 0 (no clipping) or more"),
    }

    lr: float = 6e-4
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        for name, (legal, fix) in self.ranges.items():
            require(legal(getattr(self, name)), f"optimizer.{name}", getattr(self, name), fix)

    def check_device(self, device: str) -> None:
        """Raise ConfigError if the optimizer does not run on this type of device."""

    def check_placement(self, zero: int, tensor: int, offload: str) -> None:
        """Raise ConfigError if parameters are sharded or offloaded and the optimizer does not support that."""

    def completed(self, max_steps: int, warmup: int) -> "OptimizerConfig":
        """Return the configuration for a run of `max_steps` steps, whose learning rate rises for `warmup` steps. Raises
        ConfigError for values that do not fit these."""
        return self

    def left_to_adamw(self, names: Iterable[str], embeddings: Collection[str]) -> set[str]:
        """Return those of the parameter names that AdamW updates instead of this optimizer, besides vectors."""
        return set()

    def state_elements(self) -> int:
        """Return the number of fp32 state values per parameter element."""
        return self.moments


@dataclass
class TwoMoments(OptimizerConfig):
    """Fields of optimizers with running means of the gradient and of its square."""

    ranges: ClassVar[dict[str, Range]] = {**OptimizerConfig.ranges, **BETAS_AND_EPS}

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass
class AdamWConfig(TwoMoments):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    adam_kernel: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True


@dataclass
class AdamConfig(TwoMoments):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980); weight decay is an L2 penalty."""

    adam_kernel: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    weight_decay: float = 0.0


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with (Nesterov) momentum."""

    moments: ClassVar[int] = 0
    counts: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    ranges: ClassVar[dict[str, Range]] = {**OptimizerConfig.ranges, **MOMENTUM}

    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    adascale: bool = False  # multiply the rate by the gain of the batch, and end the run sooner: docs/adascale.md
    adascale_base: int | None = None  # samples in the batch for which `lr` was tuned; null: those of one group

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        super().check()
        fix = "needs a momentum; set optimizer.momentum=0.9 or optimizer.nesterov=false"
        require(self.momentum > 0 or not self.nesterov, "optimizer.nesterov", "true", fix)

    def state_elements(self) -> int:
        """Return 1 for the momentum buffer, or 0 without momentum."""
        return 1 if self.momentum else 0


class MuonScale(Enum):
    """Scale of an update: the RMS of AdamW's updates, or Jordan's original scale, for learning rates near 0.02."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


class NewtonSchulz(Enum):
    """Coefficients of the Newton-Schulz iteration: the same in each step (`quintic`), or those of Polar Express."""

    quintic = "quintic"
    polar_express = "polar_express"


class MuonDtype(Enum):
    """Dtype of the Newton-Schulz iteration. `auto` is bf16 if the model's GEMMs are in bf16, otherwise fp32."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class MuonConfig(OptimizerConfig):
    """Orthogonalized momentum for matrices inside layers (Jordan et al. 2024), AdamW for all other parameters."""

    rule: ClassVar[str] = "gptlite.optimizer.muon"
    adam_kernel: ClassVar[bool] = True  # for the parameters that AdamW updates
    moments: ClassVar[int] = 1
    ranges: ClassVar[dict[str, Range]] = {
        **OptimizerConfig.ranges,
        **BETAS_AND_EPS,
        **MOMENTUM,
        "newton_schulz_steps": Range(lambda value: 1 <= value <= 100, "must be from 1 to 100; 5 is usual"),
        "adamw_lr_ratio": Range(positive, "must be above 0 and finite, e.g. 1.0"),
    }

    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz: NewtonSchulz = NewtonSchulz.quintic
    newton_schulz_steps: int = 5
    newton_schulz_dtype: MuonDtype = MuonDtype.auto
    scale: MuonScale = MuonScale.match_rms_adamw
    adamw_lr_ratio: float = 1.0  # AdamW's rate as a fraction of `lr`
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    # null is the former rule, to which runs saved before this key resume; the preset has a list.
    adamw_names: list[str] | None = None  # AdamW updates embeddings and names with one of these words; null: neither

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        super().check()
        names = self.adamw_names
        require(names is None or all(names), "optimizer.adamw_names", names, "has an empty word; remove it")

    def left_to_adamw(self, names: Iterable[str], embeddings: Collection[str]) -> set[str]:
        """Return those of the parameter names that AdamW updates by `adamw_names`. `embeddings` are such names, too."""
        if self.adamw_names is None:
            return set()
        words = [word.lower() for word in self.adamw_names]
        return {name for name in names if name in embeddings or any(word in name.lower() for word in words)}


# Keys are the names of the presets. `gptlite.satellites.optimizers` and plug-ins register others.
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "sgd": SGDConfig,
    "muon": MuonConfig,
}
