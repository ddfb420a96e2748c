"""Report of the attention kernel that torch's SDPA chooses on a device, and of the others that can run."""

import warnings
from collections.abc import Callable

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from gptlite.torch_private.ops import attention_choice

NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "math",
}
CHECKS: dict[str, Callable[..., bool]] = {
    "flash": cuda.can_use_flash_attention,
    "efficient": cuda.can_use_efficient_attention,
    "cuDNN": cuda.can_use_cudnn_attention,
}


def sdpa_words(device: torch.device, dtype: torch.dtype, heads: int, length: int, width: int) -> str:
    """Return a description of SDPA's kernels for causal training, e.g. `cuDNN for bfloat16 heads of 64; flash can run;
    efficient cannot: ...`."""
    qkv = torch.empty(1, length, heads, 3, width, device=device, dtype=dtype, requires_grad=True)
    q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
    taken = NAMES.get(SDPBackend(attention_choice(q, k, v)), "another kernel")
    parts = [f"{taken} for {str(dtype).removeprefix('torch.')} heads of {width}"]
    if device.type != "cuda":
        return parts[0]
    parameters = cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return "; ".join(parts + [_whether(name, parameters) for name in CHECKS if name != taken])


def _whether(name: str, parameters: cuda.SDPAParams) -> str:
    """Return `NAME can run`, or the reasons why it cannot, which torch reports as warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if CHECKS[name](parameters, True):
            return f"{name} can run"
    reasons = [str(warning.message).split(" (Triggered internally")[0].strip().rstrip(".") for warning in caught]
    return f"{name} cannot: {', '.join(reasons) or 'torch gives no reason'}"
