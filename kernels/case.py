"""Test cases of the ops: random inputs, the kernels, and the equivalent in torch's own ops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors by name, lists of them, None
Tensors = tuple[Tensor, ...]
Results = tuple[Tensors, Tensors]  # of the forward op, of the backward op
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """Case for one op, or for a forward and a backward op.

    `kernel` and `kernel_backward` call the kernels. The second gets the results of the first, changed by `between`; it
    is None for an op that computes its gradient in the forward pass. The first `compared` results (None: all) are
    compared, the others are for the backward pass. `forward` is the reference in torch. It is differentiated with
    respect to `leaves`, with the input "dy" as upstream gradient. `plain` is torch's fast version, if `forward` is only
    a definition. `traffic` gives the bytes that must be read and written forward and, if that is a separate op,
    backward. `sizes` are for CPUs, `gpu_sizes` for GPUs.
    """

    ops: tuple[str, ...]
    make: Callable[[int, int, torch.dtype, torch.device], Inputs]
    kernel: Callable[[Inputs], Tensors]
    kernel_backward: Callable[[Inputs, Tensors], Tensors] | None
    forward: Callable[[Inputs], Tensors]
    leaves: tuple[str, ...]
    sizes: Sizes
    gpu_sizes: Sizes
    traffic: Callable[[Inputs], tuple[float, ...]]
    plain: Callable[[Inputs], Tensors] | None = None
    between: Callable[[Inputs, Tensors], Tensors] = lambda inputs, results: results
    compared: int | None = 1
    cpu_only: bool = False

    def ours(self, inputs: Inputs) -> Results:
        """Return results and gradients of the kernels, in the form of `reference`."""
        results = self.between(inputs, self.kernel(inputs))
        if self.kernel_backward:
            return results[: self.compared], self.kernel_backward(inputs, results)
        return results[: self.compared], results[self.compared :] if self.leaves else ()

    def reference(self, inputs: Inputs) -> Results:
        """Return torch's results and gradients, in the dtypes of the inputs."""
        return differentiate(self.forward, inputs, self.leaves)


def differentiate(forward: Callable[[Inputs], Tensors], inputs: Inputs, leaves: tuple[str, ...]) -> Results:
    """Return the results of `forward`, and the gradients of `leaves` for the upstream gradient "dy"."""
    if not leaves:
        return forward(inputs), ()
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
    results = forward(inputs)
    gradients = torch.autograd.grad(results[0], [inputs[name] for name in leaves], inputs["dy"])
    return tuple(result.detach() for result in results), gradients


def size_of(value: Any) -> int:
    """Return the bytes of a tensor, or of the tensors in a list or dict."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value
    return sum(size_of(each) for each in parts) if isinstance(value, dict | list | tuple) else 0


def times_first(*passes: float) -> Callable[[Inputs], tuple[float, ...]]:
    """Return a traffic function: the given multiples of the bytes of the first input."""
    return lambda inputs: tuple(each * size_of(next(iter(inputs.values()))) for each in passes)
