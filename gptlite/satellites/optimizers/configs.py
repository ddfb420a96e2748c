"""Configurations of the optimizers that no preset of a model names."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gptlite.errors import ConfigError
from gptlite.ops import apex
from gptlite.optimizer.config import (
    BETAS,
    AdamWConfig,
    OptimizerConfig,
    Range,
    TwoMoments,
    not_negative,
    positive,
    require,
)
from gptlite.satellites.optimizers import torchao

# The key of an optimizer of Apex, and its alternative.
APEX_ADAM = "optimizer=apex_adam", "optimizer=adamw"
APEX_LAMB = "optimizer=apex_lamb", "optimizer=lamb"


def _require_apex(key: str, instead: str) -> None:
    if reason := apex.why_not(apex.OPTIMIZERS):
        raise ConfigError(f"{key}: {reason}, or use {instead}")


def _require_gpu(device: str, key: str, instead: str) -> None:
    if device != "cuda":
        raise ConfigError(f"{key} needs a GPU, but this runs on {device}; use {instead}")


def _refuse_offload(offload: str, key: str, instead: str) -> None:
    if offload != "none":
        raise ConfigError(
            f"{key} steps on a GPU, but parallelism.offload={offload} keeps its state elsewhere; use {instead}"
        )


@dataclass
class _Lamb(TwoMoments):
    """Defaults of LAMB."""

    weight_decay: float = 0.01
    beta2: float = 0.999
    eps: float = 1e-6


@dataclass
class LambConfig(_Lamb):
    """LAMB: Adam's update, rescaled to the norm of its weight matrix (You et al. 2019, arXiv:1904.00962)."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.lamb"
    ranges: ClassVar[dict[str, Range]] = {**_Lamb.ranges, "min_trust": Range(not_negative, "must be 0 or more")}

    min_trust: float = 0.0  # bounds on the factor that rescales an update; DeepSpeed's are 0.01 and 10
    max_trust: float | None = None

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        super().check()
        legal = self.max_trust is None or (self.max_trust > 0 and self.min_trust <= self.max_trust)
        require(legal, "optimizer.max_trust", self.max_trust, "must be above 0 and at least optimizer.min_trust")


@dataclass
class ApexAdamConfig(AdamWConfig):
    """AdamW, computed by NVIDIA Apex's FusedAdam."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.apex"
    adam_kernel: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError for values out of range, and if Apex is not installed."""
        super().check()
        _require_apex(*APEX_ADAM)

    def check_device(self, device: str) -> None:
        """Raise ConfigError unless the device is a GPU."""
        _require_gpu(device, *APEX_ADAM)

    def check_placement(self, zero: int, tensor: int, offload: str) -> None:
        """Raise ConfigError for offloaded parameters."""
        _refuse_offload(offload, *APEX_ADAM)


@dataclass
class ApexLambConfig(_Lamb):
    """LAMB, computed by NVIDIA Apex's FusedLAMB. Its norms cover only this rank's shard of each parameter."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.apex"

    def check(self) -> None:
        """Raise ConfigError for values out of range, and if Apex is not installed."""
        super().check()
        _require_apex(*APEX_LAMB)

    def check_device(self, device: str) -> None:
        """Raise ConfigError unless the device is a GPU."""
        _require_gpu(device, *APEX_LAMB)

    def check_placement(self, zero: int, tensor: int, offload: str) -> None:
        """Raise ConfigError for offloaded parameters, and for sharded ones, whose norms Apex does not know."""
        _refuse_offload(offload, *APEX_LAMB)
        if zero > 0 or tensor > 1:
            key = f"parallelism.zero={zero}" if zero > 0 else f"parallelism.tensor={tensor}"
            raise ConfigError(
                f"optimizer=apex_lamb needs the norms of whole parameters, but {key} shards them; use optimizer=lamb"
            )


@dataclass
class LionConfig(OptimizerConfig):
    """Lion: an update by the sign of a momentum (Chen et al. 2023, arXiv:2302.06675)."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.lion"
    moments: ClassVar[int] = 1
    counts: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    ranges: ClassVar[dict[str, Range]] = {**OptimizerConfig.ranges, **BETAS}

    lr: float = 1e-4
    weight_decay: float = 1.0
    beta1: float = 0.95
    beta2: float = 0.98


@dataclass
class AdamW8bitConfig(TwoMoments):
    """AdamW with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861), computed by torchao."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.adamw_8bit"
    moments: ClassVar[int] = 0

    def check(self) -> None:
        """Raise ConfigError for values out of range, and if torchao is not installed."""
        super().check()
        if reason := torchao.why_not():
            raise ConfigError(f"optimizer=adamw_8bit: {reason}, or use optimizer=adamw")


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Adafactor: factored second moments, and a relative `lr` (Shazeer and Stern 2018, arXiv:1804.04235)."""

    rule: ClassVar[str] = "gptlite.satellites.optimizers.adafactor"
    moments: ClassVar[int] = 0
    ranges: ClassVar[dict[str, Range]] = {
        **OptimizerConfig.ranges,
        "decay": Range(lambda value: 0 < value <= 1, "must be above 0 and at most 1, e.g. 0.8"),
        "clip_threshold": Range(positive, "must be above 0 and finite, e.g. 1.0"),
        # The smallest normal fp32 number is about 1.2e-38.
        "eps1": Range(lambda value: 1e-37 <= value < math.inf, "must be 1e-37 or more, e.g. 1e-30"),
        "eps2": Range(positive, "must be above 0, e.g. 1e-3"),
    }

    lr: float = 1e-2
    weight_decay: float = 0.0
    decay: float = 0.8  # beta2 of step t is 1 - t^-decay
    clip_threshold: float = 1.0  # upper limit of the RMS of each update
    eps1: float = 1e-30  # added to squared gradients
    eps2: float = 1e-3  # lower bound on the RMS of a parameter
