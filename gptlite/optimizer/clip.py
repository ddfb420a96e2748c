"""The norm of all gradients together, and clipping by it. Nothing here waits for the device."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# One CPU kernel call adds up its squares in fp32, and the rounding grows with their number: a norm of 40M elements
# came out 3e-3 wrong, in pieces of this size 2e-7, at about the same speed. CUDA's kernel cuts such pieces itself.
CPU_PIECE = 2**16


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; 0 only measures.

    Returns the norm before clipping: 0-dim, fp32, on the gradients' device, and not yet computed there if that
    is a GPU. If it is inf or NaN the scaled gradients are worthless: look at the norm before stepping.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters)
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The L2 norm of all gradients as if they were one vector: 0-dim, fp32. 0 where there are no gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    # 16-bit gradients are summed in fp32 too: fp16 ends at 65504, and bf16 has 8 bits.
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """Views of at most CPU_PIECE elements on a CPU, elsewhere the gradient itself."""
    if gradient.device.type != "cpu" or gradient.numel() <= CPU_PIECE:
        return (gradient,)
    return gradient.flatten().split(CPU_PIECE)
