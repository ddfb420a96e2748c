"""Precision policy: the dtype of each computation (docs/precision.md).

Parameters (except with bf16_stochastic) and optimizer state stay in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from gptlite.cpu import cpu_flags
from gptlite.errors import ConfigError

if TYPE_CHECKING:
    import torch

UNTRIED = "bf16 of ARM CPUs is untried"


class Precision(Enum):
    """Precision presets. `auto` is bf16 if the hardware supports it, else fp32. Master weights are fp32.

    `fp16` is like `bf16`, with a loss scale. `amp_o1` and `amp_o2` are Apex's optimization levels O1 and O2. `fp8` is
    `bf16`, but the linear layers and experts of blocks run their GEMMs in fp8.
    """

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    amp_o1 = "amp_o1"
    amp_o2 = "amp_o2"
    fp8 = "fp8"


class Reduce(Enum):
    """Dtype in which ZeRO sums gradients over data-parallel ranks: fp32, or the compute dtype."""

    fp32 = "fp32"
    compute = "compute"


class LossScaleRule(Enum):
    """Rule of the loss scale: that of Megatron-LM, or that of DeepSpeed.

    By DeepSpeed's rule, the scale grows a step later after an overflow and at the start, and a skipped step does not
    advance the learning-rate schedule.
    """

    megatron = "megatron"
    deepspeed = "deepspeed"


MOST_SCALE_POWER = 32
SCALING_KEYS = (
    *("loss_scale", "loss_scale_rule", "loss_scale_window", "hysteresis"),
    *(DYNAMIC_KEYS := ("initial_scale_power", "min_loss_scale", "scale_factor")),
)
SCALED = (Precision.fp16, Precision.amp_o1, Precision.amp_o2)


@dataclass
class PrecisionConfig:
    """Precision policy and, for fp16, loss scaling with DeepSpeed's key names."""

    dtype: Precision = Precision.auto
    fp8_head: bool = False  # true: the output head's GEMMs run in fp8, with precision=bf16 or fp8
    reduce: Reduce = Reduce.fp32
    master_weights: bool = True  # false: parameters are bf16, updated with stochastic rounding
    loss_scale: float = 0.0  # 0: dynamic, controlled by the keys below; otherwise a fixed loss scale
    loss_scale_rule: LossScaleRule = LossScaleRule.megatron  # deepspeed: a skipped step does not advance the schedule
    initial_scale_power: int = 16  # the initial scale is 2 to this power
    loss_scale_window: int = 1000  # steps without overflow before the scale grows
    hysteresis: int = 2  # overflows before the scale shrinks; the count restarts when the scale grows
    min_loss_scale: float = 1.0  # lower limit; the run ends if an overflow would shrink the scale below it
    scale_factor: float = 2.0  # factor by which the scale grows and shrinks


@dataclass(frozen=True)
class Policy:
    """Resolved dtypes, like FSDP2's mixed-precision policy with additional settings (table in docs/precision.md).

    `compute_dtype` is the dtype of matrix multiplications and attention; `reason` explains the choice in the banner.
    """

    compute_dtype: torch.dtype
    reason: str
    precision: Precision = Precision.auto
    reduce: Reduce = Reduce.fp32
    master_weights: bool = True
    fp8_head: bool = False

    @property
    def name(self) -> str:
        """Name of the policy, such as `bf16`, `fp32`, `amp_o1` or `bf16_stochastic`."""
        if not self.master_weights:
            return "bf16_stochastic"
        if self.precision is not Precision.auto:
            return self.precision.value
        return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(self.compute_dtype).partition(".")[2]]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of parameters between steps. Reduced gradients and optimizer state are fp32."""
        import torch

        return torch.float32 if self.master_weights else torch.bfloat16

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of activations between layers."""
        import torch

        return torch.float32 if self.precision is Precision.amp_o1 else self.compute_dtype

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which FSDP2 all-gathers parameters. With Apex's levels it is fp32, and layers cast after the gather,
        since they use some parameters in fp32."""
        import torch

        return torch.float32 if self.precision in (Precision.amp_o1, Precision.amp_o2) else self.compute_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which FSDP2 sums gradients."""
        import torch

        return torch.float32 if self.reduce is Reduce.fp32 else self.compute_dtype

    @property
    def fp32_norms(self) -> bool:
        """True if norms of 16-bit inputs compute in fp32, with fp32 gains."""
        return self.precision is Precision.amp_o2

    @property
    def fp8(self) -> bool:
        """True if the linear layers and experts of blocks run their GEMMs in fp8."""
        return self.precision is Precision.fp8

    @property
    def fp8_weights(self) -> bool:
        """True if any layer's GEMMs run in fp8."""
        return self.fp8 or self.fp8_head

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled. fp16 needs this, since gradients below 6e-8 underflow."""
        import torch

        return self.compute_dtype == torch.float16


def check_precision(config: PrecisionConfig) -> None:
    """Raise ConfigError for invalid loss-scaling keys, master_weights=false without bf16, and keys without effect."""
    scale, power, least = config.loss_scale, config.initial_scale_power, config.min_loss_scale
    if not 0 <= scale <= 2.0**MOST_SCALE_POWER:
        raise ConfigError(f"precision.loss_scale={scale:g} must be 0 (dynamic) or a positive number up to 2**32")
    if not 0 <= power <= MOST_SCALE_POWER:
        raise ConfigError(f"precision.initial_scale_power={power} must be 0 to {MOST_SCALE_POWER}, e.g. 16")
    for key in ("loss_scale_window", "hysteresis"):
        if getattr(config, key) < 1:
            raise ConfigError(f"precision.{key}={getattr(config, key)} must be at least 1")
    if not 0 < least <= 2.0**power:
        raise ConfigError(
            f"precision.min_loss_scale={least:g} must be above 0 and at most the initial scale, "
            f"2**{power} = {2**power} (precision.initial_scale_power)"
        )
    if not 1 < config.scale_factor < math.inf:
        raise ConfigError(f"precision.scale_factor={config.scale_factor:g} must be above 1, e.g. 2")
    if not config.master_weights and config.dtype is not Precision.bf16:
        raise ConfigError(
            f"precision.master_weights=false stores parameters in bf16 and is not supported with "
            f"precision={config.dtype.value}; use precision=bf16_stochastic, or leave out precision.master_weights"
        )
    if config.fp8_head and config.dtype not in (Precision.bf16, Precision.fp8):
        raise ConfigError(
            f"precision.fp8_head=true is not supported with precision={config.dtype.value}; use precision=bf16 or fp8, "
            f"or leave out precision.fp8_head"
        )
    _refuse_idle_keys(config)


def _refuse_idle_keys(config: PrecisionConfig) -> None:
    """Raise ConfigError for a key that is set but has no effect."""
    changed = [each.name for each in fields(config) if getattr(config, each.name) != each.default]
    scaling = [key for key in changed if key in SCALING_KEYS]
    name = config.dtype.value
    if scaling and config.dtype not in SCALED:
        raise ConfigError(
            f"precision.{scaling[0]}={_text(config, scaling[0])} has no effect with precision={name}, which does "
            f"not scale the loss; use precision={'/'.join(each.value for each in SCALED)}, or leave out the key"
        )
    idle = [key for key in scaling if key in DYNAMIC_KEYS]
    if config.loss_scale and idle:
        raise ConfigError(
            f"precision.{idle[0]}={_text(config, idle[0])} has no effect with precision.loss_scale="
            f"{config.loss_scale:g}, a fixed scale; use precision.loss_scale=0, or leave out the key"
        )
    if config.reduce is Reduce.compute and config.dtype is Precision.fp32:
        raise ConfigError(
            "precision.reduce=compute has no effect with precision=fp32; use precision=bf16, or leave out the key"
        )


def _text(config: PrecisionConfig, key: str) -> str:
    value = getattr(config, key)
    return value.name if isinstance(value, Enum) else f"{value:g}"


def resolve_precision(config: PrecisionConfig, device: torch.device) -> Policy:
    """Resolve the policy for a device. Raises ConfigError if the device cannot compute in the dtype: a GPU needs sm_80
    for bf16, sm_53 for fp16 and sm_89 for fp8."""
    dtype, precision, reason = _resolved(config, device)
    if config.fp8_head:
        if lacking := _no_fp8(device):
            raise ConfigError(f"precision.fp8_head=true: {lacking}; use precision.fp8_head=false")
        reason += "; output head in fp8"
    return Policy(dtype, reason, precision, config.reduce, config.master_weights, config.fp8_head)


def _resolved(config: PrecisionConfig, device: torch.device) -> tuple[torch.dtype, Precision, str]:
    import torch

    native, hardware = native_bf16(device)
    match config.dtype:
        case Precision.fp32:
            return torch.float32, config.dtype, "asked for"
        case Precision.bf16:
            if not native and device.type == "cuda":
                raise ConfigError(f"precision=bf16: {hardware}; use precision=fp32")
            return torch.bfloat16, config.dtype, _asked_for(native, hardware)
        case Precision.fp16 | Precision.amp_o1 | Precision.amp_o2:
            native, hardware = native_fp16(device)
            if not native and device.type == "cuda":
                raise ConfigError(f"precision={config.dtype.value}: {hardware}; use precision=fp32")
            return torch.float16, config.dtype, _asked_for(native, hardware)
        case Precision.fp8:
            if lacking := _no_fp8(device):
                raise ConfigError(f"precision=fp8: {lacking}; use precision=bf16 or fp16")
            words = "" if device.type == "cuda" else ", though no CPU has fp8 in hardware: bf16 or fp32 is faster"
            return torch.bfloat16, config.dtype, f"asked for{words}"
        case Precision.auto:
            dtype, precision = (torch.bfloat16, Precision.bf16) if native else (torch.float32, Precision.fp32)
            return dtype, precision, f"auto: {hardware}"


def _asked_for(native: bool, hardware: str) -> str:
    return "asked for" if native or hardware is UNTRIED else f"asked for, though {hardware}: fp32 is faster"


def native_bf16(device: torch.device) -> tuple[bool, str]:
    """Return True if the device has bf16 matrix multiplication in hardware, and a description of the hardware."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = "has" if major >= 8 else "has no"
        return major >= 8, f"sm_{major}{minor} {has} native bf16"
    flags = cpu_flags()
    for flag, words in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return True, f"the CPU has bf16 in hardware ({words})"
    return False, UNTRIED if "bf16" in flags else "the CPU has no bf16 in hardware"


def native_fp16(device: torch.device) -> tuple[bool, str]:
    """Return True if the device has fp16 arithmetic in hardware, and a description of the hardware."""
    import torch

    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has = "has" if capability >= (5, 3) else "has no"
        return capability >= (5, 3), f"sm_{capability[0]}{capability[1]} {has} native fp16"
    native = bool(cpu_flags() & {"avx512_fp16", "amx_fp16"})
    return native, f"the CPU has {'fp16' if native else 'no fp16'} in hardware"


def _no_fp8(device: torch.device) -> str:
    """Return the reason why a device has no fp8 GEMM; empty if it has one."""
    import torch

    from gptlite.torch_private.ops import scaled_mm

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        newer = (major, minor) >= (8, 9)
        return "" if newer else f"sm_{major}{minor} has no fp8, which needs sm_89 (Ada), sm_90 (Hopper) or newer"
    # Support on other devices depends on torch's build and cannot be queried, so try a small GEMM.
    x, scale = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
    try:
        scaled_mm(x, x.t(), scale, scale)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no fp8 GEMM for {device.type} ({str(error).splitlines()[0]})"
    return ""
