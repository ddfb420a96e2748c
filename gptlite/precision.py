"""Which dtype computes. Parameters, gradients' reduction and the optimizer stay in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Precision(Enum):
    """`auto` is bf16 where the hardware computes in it, else fp32; `bf16` has fp32 master weights and reductions."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class PrecisionConfig:
    """The dtype policy."""

    dtype: Precision = Precision.auto


@dataclass(frozen=True)
class Policy:
    """What FSDP2 calls a mixed-precision policy: parameters cast for compute, gradients reduced in fp32."""

    compute_dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """`bf16` or `fp32`."""
        return "bf16" if self.compute_dtype.itemsize == 2 else "fp32"


def resolve_precision(config: PrecisionConfig, device: torch.device) -> Policy:
    """The policy a device runs. Raises ConfigError for bf16 on a GPU older than sm_80."""
    import torch

    native, hardware = native_bf16(device)
    match config.dtype:
        case Precision.fp32:
            return Policy(torch.float32, "asked for")
        case Precision.bf16:
            if not native and device.type == "cuda":
                raise ConfigError(f"precision=bf16: {hardware}; use precision=fp32")
            return Policy(torch.bfloat16, "asked for" if native else f"asked for, though {hardware}: fp32 is faster")
        case Precision.auto:
            return Policy(torch.bfloat16 if native else torch.float32, f"auto: {hardware}")


def native_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether a device multiplies bf16 in hardware, and the words for it."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = "has" if major >= 8 else "has no"
        return major >= 8, f"sm_{major}{minor} {has} native bf16"
    flags = cpu_flags()
    for flag, words in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return True, f"the CPU has bf16 in hardware ({words})"
    return False, "the CPU has no bf16 in hardware"


def cpu_flags() -> set[str]:
    """The instruction sets the kernel reports; empty where it does not say (then nothing is assumed)."""
    return set(_cpuinfo("flags").split())


def cpu_name() -> str:
    """The processor's name, or nothing where the kernel does not say."""
    return _cpuinfo("model name")


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(key)), "")
    except OSError:
        return ""
