"""Peak FLOP/s of dense matrix multiplication by device: the denominator of MFU."""

import re

import torch

# TFLOP/s without sparsity, from the vendors' data sheets: bf16, fp16, tf32, fp32 (None: not supported, or unknown).
# GeForce peaks assume fp32 accumulation, which training uses; fp16 accumulation would be twice as fast. The first
# pattern that occurs in the device's name applies, so a variant comes before its family.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float | None]], ...] = (
    (r"Laptop|Max-Q|MIG", (None, None, None, None)),
    (r"GB200", (2500, 2500, 1250, 80)),
    (r"B200", (2250, 2250, 1125, 75)),
    (r"H200 NVL|H100 NVL", (835, 835, 417, 60)),
    (r"H100 PCIe", (756, 756, 378, 51)),
    (r"GH200|H[128]00", (989.4, 989.4, 494.7, 66.9)),
    (r"A[18]00", (312, 312, 156, 19.5)),
    (r"L40S", (362, 362, 183, 91.6)),
    (r"L4", (121, 121, 60, 30.3)),
    (r"RTX 6000 Ada", (364.2, 364.2, 182.1, 91.1)),
    (r"RTX A6000", (154.8, 154.8, 77.4, 38.7)),
    (r"A40", (149.7, 149.7, 74.8, 37.4)),
    (r"A10", (125, 125, 62.5, 31.2)),
    (r"V100S", (None, 130, None, 16.4)),
    (r"V100-PCIE", (None, 112, None, 14)),
    (r"V100", (None, 125, None, 15.7)),
    (r"T4", (None, 65, None, 8.1)),
    (r"RTX 5090", (209.5, 209.5, 104.8, 104.8)),
    (r"RTX 4090(?! D)", (165.2, 165.2, 82.6, 82.6)),
    (r"RTX 3090 Ti", (80, 80, 40, 40)),
    (r"RTX 3090", (71, 71, 35.6, 35.6)),
    (r"MI300X", (1307.4, 1307.4, 653.7, 163.4)),
)


def peak_flops(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak in FLOP/s of the device called `name`, for matrix multiplications in `dtype`.

    `name` is as returned by `torch.cuda.get_device_name`. `tf32` is True if float32 multiplications may use TF32.
    Returns None if the peak is not known; MFU is then n/a instead of a guess.
    """
    columns = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2 if tf32 else 3}
    if dtype not in columns:
        return None
    for pattern, peaks in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name):
            peak = peaks[columns[dtype]]
            # A device without TF32 units uses its float32 units, even if TF32 is allowed.
            if peak is None and dtype == torch.float32:
                peak = peaks[3]
            return None if peak is None else peak * 1e12
    return None


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return `peak_flops` of one of this process's devices; None for a CPU."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32)
