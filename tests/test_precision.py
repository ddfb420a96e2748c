"""The dtype policy of each kind of hardware."""

import subprocess
import sys

import pytest
import torch

from gptlite import precision
from gptlite.errors import ConfigError
from gptlite.precision import Precision, PrecisionConfig, resolve_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def hardware(monkeypatch):
    """Pretends the CPU reports these flags, or the GPU this compute capability."""

    def pretend(flags: str = "", capability: tuple[int, int] = (0, 0)) -> None:
        monkeypatch.setattr(precision, "cpu_flags", lambda: set(flags.split()))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize(
    ("found", "dtype", "words"),
    [
        ("avx2 avx512f amx_bf16 avx512_bf16", torch.bfloat16, "AMX"),
        ("avx2 avx512_bf16", torch.bfloat16, "AVX512-BF16"),
        ("avx2 avx512f", torch.float32, "no bf16 in hardware"),
        ("", torch.float32, "no bf16 in hardware"),
        ("asimd sve bf16", torch.float32, "bf16 of ARM CPUs is untried"),
        ((7, 5), torch.float32, "sm_75"),
        ((8, 0), torch.bfloat16, "sm_80"),
        ((9, 0), torch.bfloat16, "sm_90"),
    ],
)
def test_auto_chooses_the_precision_by_the_hardware_and_gives_the_reason(hardware, found, dtype, words):
    hardware(**{"flags" if isinstance(found, str) else "capability": found})
    policy = resolve_precision(PrecisionConfig(), CPU if isinstance(found, str) else CUDA)
    assert policy.compute_dtype == dtype
    assert policy.reason.startswith("auto: ")
    assert words in policy.reason


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_fp32_is_always_to_be_had(hardware, device):
    hardware("amx_bf16", (9, 0))
    policy = resolve_precision(PrecisionConfig(Precision.fp32), device)
    assert (policy.compute_dtype, policy.name) == (torch.float32, "fp32")


def test_bf16_asked_for_on_a_cpu_without_it_runs_and_says_so(hardware):
    hardware("avx2")
    policy = resolve_precision(PrecisionConfig(Precision.bf16), CPU)
    assert (policy.compute_dtype, policy.name) == (torch.bfloat16, "bf16")
    assert "fp32 is faster" in policy.reason
    for flag in ("amx_bf16", "bf16"):  # the second one of ARM
        hardware(flag)
        assert resolve_precision(PrecisionConfig(Precision.bf16), CPU).reason == "asked for"


def test_bf16_asked_for_on_an_old_gpu_is_refused(hardware):
    hardware(capability=(7, 0))
    with pytest.raises(ConfigError, match=r"precision=bf16: sm_70 .*use precision=fp32"):
        resolve_precision(PrecisionConfig(Precision.bf16), CUDA)
    hardware(capability=(8, 0))
    assert resolve_precision(PrecisionConfig(Precision.bf16), CUDA).compute_dtype == torch.bfloat16


def test_composing_a_configuration_needs_no_torch():
    code = "import sys, gptlite.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
