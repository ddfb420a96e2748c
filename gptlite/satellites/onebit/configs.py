"""Configurations of the 1-bit optimizers. Does not import torch."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from gptlite.errors import ConfigError
from gptlite.optimizer.config import AdamWConfig, OptimizerConfig, Range, positive, require
from gptlite.optimizer.registry import optimizer_name
from gptlite.satellites.optimizers.configs import LambConfig

Kind = TypeVar("Kind", bound="OneBitAdamConfig | OneBitLambConfig")
SHARE = 0.15  # of the steps, the default of `freeze_step`: that of 1-bit Adam's runs (arXiv:2102.02888)


@dataclass
class OneBitAdamConfig(AdamWConfig):
    """AdamW whose momenta are exchanged as signs once the second moments are frozen (arXiv:2102.02888)."""

    rule: ClassVar[str] = "gptlite.satellites.onebit.adam"
    elementwise: ClassVar[bool] = False  # the scale of a sign is a mean over other elements

    beta2: float = 0.999
    freeze_step: int | None = None  # last step of AdamW's own; null: 15% of the run, or the rate's warm-up

    def check_placement(self, zero: int, tensor: int, offload: str) -> None:
        """Raise ConfigError for ZeRO 2 and 3, and for offloaded state."""
        _refuse_placement(self, zero, offload)

    def completed(self, max_steps: int, warmup: int) -> Self:
        """Return the configuration with `freeze_step`. Raises ConfigError if it does not fit the run's length."""
        return _with_freeze(self, max_steps, warmup)


@dataclass
class ZeroOneAdamConfig(OneBitAdamConfig):
    """0/1 Adam (arXiv:2202.06009): second moments are refreshed less and less often before they are frozen, and momenta
    exchanged less and less often after that."""

    rule: ClassVar[str] = "gptlite.satellites.onebit.zero_one"
    ranges: ClassVar[dict[str, Range]] = {
        **OneBitAdamConfig.ranges,
        "var_update_scaler": Range(lambda value: value >= 1, "must be 1 or more, e.g. 16"),
        "local_step_clipper": Range(lambda value: value >= 1, "must be 1 (exchanges in all steps) or more, e.g. 16"),
    }

    var_update_scaler: int = 16  # refreshes after which the interval between them doubles
    local_step_scaler: int | None = None  # steps after which that between exchanges doubles; null: 1/4 of those left
    local_step_clipper: int = 1  # largest number of steps from an exchange to the next, after `freeze_step`

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        super().check()
        key, scaler = "optimizer.local_step_scaler", self.local_step_scaler
        require(scaler is None or scaler >= 1, key, scaler, "must be 1 or more, or null for a quarter of the steps")

    def completed(self, max_steps: int, warmup: int) -> Self:
        """Return the configuration with `freeze_step` and `local_step_scaler`. Raises ConfigError if the former does
        not fit the run's length."""
        config = super().completed(max_steps, warmup)
        assert config.freeze_step is not None
        quarter = max(1, (max_steps - config.freeze_step) // 4)
        return replace(config, local_step_scaler=self.local_step_scaler or quarter)


@dataclass
class OneBitLambConfig(LambConfig):
    """LAMB whose momenta are exchanged as signs once second moments and trust ratios are frozen (arXiv:2104.06069)."""

    rule: ClassVar[str] = "gptlite.satellites.onebit.lamb"
    moments: ClassVar[int] = 3  # with the second moments of the exchanged momenta
    ranges: ClassVar[dict[str, Range]] = {
        **LambConfig.ranges,
        "coeff_beta": Range(lambda value: 0 <= value < 1, "must be in [0, 1), e.g. 0.9"),
        "factor_min": Range(lambda value: 0 < value <= 1, "must be above 0 and at most 1, e.g. 0.5"),
        "factor_max": Range(lambda value: 1 <= value < float("inf"), "must be 1 or more, e.g. 4.0"),
        "factor_threshold": Range(positive, "must be above 0, e.g. 0.1"),
    }

    freeze_step: int | None = None  # last step of LAMB's own; null: 15% of the run, or the rate's warm-up
    coeff_beta: float = 0.9  # decay rate of the mean of a matrix's trust ratios during the warm-up
    factor_min: float = 0.5  # bounds on the factor by which the frozen mean is later multiplied
    factor_max: float = 4.0
    factor_threshold: float = 0.1  # limit on the change of that factor in a step, relative to it

    def check_placement(self, zero: int, tensor: int, offload: str) -> None:
        """Raise ConfigError for ZeRO 2 and 3, and for offloaded state."""
        _refuse_placement(self, zero, offload)

    def completed(self, max_steps: int, warmup: int) -> Self:
        """Return the configuration with `freeze_step`. Raises ConfigError if it does not fit the run's length."""
        return _with_freeze(self, max_steps, warmup)


def exchanges_momenta(config: Any) -> bool:
    """Return True if a run has a 1-bit optimizer."""
    return isinstance(config.optimizer, OneBitAdamConfig | OneBitLambConfig)


def check_onebit(config: Any) -> None:
    """Raise ConfigError if another section of the configuration rules out a 1-bit optimizer."""
    optimizer, layout = config.optimizer, config.parallelism
    if not exchanges_momenta(config):
        return
    key = f"optimizer={optimizer_name(type(optimizer))}"
    if layout.expert > 1:
        raise ConfigError(
            f"{key} exchanges momenta over all data ranks, but parallelism.expert={layout.expert} divides experts "
            "among them; use parallelism.expert=1, or optimizer=adamw"
        )
    if config.trainer.noise_scale:
        raise ConfigError(
            f"trainer.noise_scale=true observes the sums of gradients that {key} replaces; "
            "use trainer.noise_scale=false, or optimizer=adamw"
        )
    _refuse_local_steps(optimizer, layout)
    compression = getattr(getattr(layout, "compression", None), "value", "none")
    if compression != "none":
        raise ConfigError(
            f"{key} replaces the sums of gradients that parallelism.compression={compression} compresses; "
            "use parallelism.compression=none, or optimizer=adamw"
        )


def _refuse_local_steps(optimizer: OptimizerConfig, layout: Any) -> None:
    """Raise ConfigError for local steps on a layout in whose forward passes ranks use each other's parameters."""
    clipper = getattr(optimizer, "local_step_clipper", 1)
    key = f"optimizer.local_step_clipper={clipper} lets the parameters of data ranks differ between exchanges"
    if clipper > 1 and layout.zero and layout.dp_replicate == 1:
        raise ConfigError(
            f"{key}, but parallelism.zero={layout.zero} gathers a single copy from all of them in every step; use "
            "parallelism=ddp, or optimizer.local_step_clipper=1"
        )
    if clipper > 1 and layout.context > 1:
        raise ConfigError(
            f"{key}, but parallelism.context={layout.context} shares keys and values of one copy; use "
            "parallelism.context=1, or optimizer.local_step_clipper=1"
        )


def _refuse_placement(config: OptimizerConfig, zero: int, offload: str) -> None:
    key = f"optimizer={optimizer_name(type(config))}"
    if zero > 1:
        raise ConfigError(
            f"{key} needs whole gradients on all data ranks, which parallelism.zero={zero} frees; use "
            "parallelism=zero1, or optimizer=adamw"
        )
    if offload != "none":
        raise ConfigError(
            f"{key} exchanges momenta from device memory, but parallelism.offload={offload} keeps them elsewhere; use "
            "parallelism.offload=none, or optimizer=adamw"
        )


def _with_freeze(config: Kind, max_steps: int, warmup: int) -> Kind:
    """Return the configuration with a `freeze_step` that ends between the learning rate's warm-up and the last step."""
    key, step = "optimizer.freeze_step", config.freeze_step
    step = max(1, round(SHARE * max_steps), warmup) if step is None else step
    advice = f"set {key}={max(1, max_steps // 6, warmup)}" if max_steps > 1 else "use trainer.max_steps=2 or more"
    fix = f"must be below trainer.max_steps={max_steps} and at least 1; {advice}"
    require(1 <= step < max_steps, key, step, fix)
    fix = f"freezes second moments while the learning rate rises; set {key}={warmup}, or schedule.warmup_steps={step}"
    require(step >= warmup, key, step, fix)
    return replace(config, freeze_step=step)
