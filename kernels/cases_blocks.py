"""Test cases of quantization: blockwise, to a message and back, and of a matrix to fp8."""

import torch
from torch import Tensor

from gptlite.kernels.case import Case, Inputs, Tensors, size_of

OPS = torch.ops.gptlite
# CPU sizes, then GPU sizes, which exceed the cache: values are rows x width.
FP8 = torch.float8_e4m3fn
MATRICES = ((256, 256), (2048, 2048)), ((32768, 2048), (32768, 8192))
BLOCKS = ((256, 256), (2048, 2048)), ((4096, 4096), (16384, 8192))


def _torch_integers(x: Tensor, bits: int) -> Tensor:
    most = 2 ** (bits - 1) - 1
    scales = x.abs().amax(-1, keepdim=True) / most
    return (x / scales).round().clamp(-most, most) * scales


def _torch_signs(x: Tensor, bits: int) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0) * x.abs().mean(-1, keepdim=True)


def _case(name: str, bits: int, width: int) -> Case:
    def make(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        return {"x": torch.randn(max(1, rows * columns // width), width, device=device)}  # of fp32 alone

    def there_and_back(inputs: Inputs) -> Tensors:
        message = OPS.quantize_blocks(inputs["x"], None, bits)
        return (OPS.dequantize_blocks(message, None, len(inputs["x"]), bits),)

    def traffic(inputs: Inputs) -> tuple[float, ...]:
        """Bytes of both ops: values and messages are read and written."""
        x = inputs["x"]
        return (2 * (size_of(x) + len(x) * (4 + width * bits // 8)),)

    reference = _torch_signs if bits == 1 else _torch_integers
    return Case(
        (f"quantize_blocks {name}",),
        make,
        there_and_back,
        None,
        lambda given: (reference(given["x"], bits),),
        (),
        *BLOCKS,
        traffic=traffic,
    )


def _numbers(inputs: Inputs, results: Tensors) -> Tensors:
    return tuple(each.view(FP8).float() for each in results)


def _fp8(name: str, both: bool) -> Case:
    def make(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        x = torch.randn(rows, width, dtype=dtype, device=device)
        return {"x": x, "amax": x.abs().max().float()}

    def kernel(inputs: Inputs) -> Tensors:
        return OPS.quantize_fp8(inputs["x"], inputs["amax"], False, both)[: 1 + both]

    def reference(inputs: Inputs) -> Tensors:
        y = (inputs["x"].float() / (inputs["amax"].float() / torch.finfo(FP8).max)).to(FP8)
        return (y.float(), y.t().float()) if both else (y.float(),)

    def traffic(inputs: Inputs) -> tuple[float, ...]:
        x = inputs["x"]
        return (size_of(x) + (1 + both) * x.numel(),)

    return Case((name,), make, kernel, None, reference, (), *MATRICES, traffic=traffic, between=_numbers, compared=None)


QUANTIZATION = (
    *(_case("int8", 8, 256), _case("int4", 4, 256), _case("sign", 1, 1024)),
    *(_fp8("quantize_fp8", both=True), _fp8("quantize_fp8 one layout", both=False)),
)
