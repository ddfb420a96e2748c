"""Gradient norm of a rank, and clipping by the global norm. Nothing here synchronizes with the device."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gptlite.optimizer.base import local_gradients
from gptlite.torch_private.ops import foreach_mul_, foreach_norm

# One call of the CPU kernel sums squares in fp32, and the rounding error grows with their number. For 40M elements the
# relative error of the norm was 3e-3 in one call and 2e-7 in pieces of this size, at about the same speed. The CUDA
# kernel splits its input itself.
CPU_PIECE = 2**16


@torch.no_grad()
def local_grad_norm(parameters: Iterable[nn.Parameter], fused: bool = False) -> Tensor:
    """Return the L2 norm of all of this rank's gradient shards together, an fp32 scalar; 0 if there are no gradients.

    `fused` uses our kernel, in one call.
    """
    gradients = local_gradients(parameters)
    if not gradients:
        return torch.zeros(())
    if fused:
        return torch.ops.gptlite.norm(gradients)
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    # 16-bit gradients are summed in fp32 too: fp16 overflows above 65504, and bf16 has only 8 bits of precision.
    norms = foreach_norm(pieces, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def square_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of each tensor [len(tensors)], fp64. `tensors` must not be empty."""
    pieces = [_pieces(tensor) for tensor in tensors]
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = foreach_norm([piece for each in pieces for piece in each], 2, dtype=dtype)
    squares = torch.stack(norms).double().square()
    return torch.stack([each.sum() for each in squares.split([len(each) for each in pieces])])


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor, loss_scale: float | Tensor = 1.0
) -> None:
    """Scale all gradients in place so that their global `norm` is at most `max_norm`; 0 means no clipping.

    If the loss was multiplied by `loss_scale`, so were the gradients and `norm`; the gradients are then also divided by
    `loss_scale`. If the norm is inf or NaN, the resulting gradients are invalid: check the norm before stepping.
    """
    factor = clip_factor(max_norm, norm, loss_scale)
    if factor is not None and (gradients := local_gradients(parameters)):
        foreach_mul_(gradients, factor.to(gradients[0].device))


def clip_factor(max_norm: float, norm: Tensor, loss_scale: float | Tensor = 1.0) -> Tensor | None:
    """Return the factor for gradients with this norm: the clipping coefficient (at most 1) divided by `loss_scale`.

    None means 1. `norm` is that of the gradients of the loss times `loss_scale`; `max_norm` is for the unscaled loss.
    """
    if not isinstance(loss_scale, Tensor) and loss_scale == 1.0:
        # 1e-6 as in torch's clip_grad_norm_
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else None
    if max_norm > 0:
        return torch.clamp(max_norm / (norm / loss_scale + 1e-6), max=1.0) / loss_scale
    return 1 / loss_scale if isinstance(loss_scale, Tensor) else torch.full_like(norm, 1 / loss_scale)


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    """Return views of at most CPU_PIECE elements on a CPU, and the gradient itself on other devices."""
    if gradient.device.type != "cpu" or gradient.numel() <= CPU_PIECE:
        return (gradient,)
    return gradient.flatten().split(CPU_PIECE)
