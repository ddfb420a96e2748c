"""Test cases of the ops: random inputs, the kernels, and the equivalent in torch's own ops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors, lists of tensors or None, by name
Tensors = tuple[Tensor, ...]
Results = tuple[Tensors, Tensors]  # results of the forward op, and of the backward op
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """Test case of an op, or of a forward op and its backward op.

    `kernel` calls the forward kernel. `kernel_backward` calls the backward kernel with the results of `kernel` after
    `between` has transformed them. It is None if the op has no gradient, or if `kernel` computes the gradient. Of the
    results, the first `compared` (None: all) are compared; the others are gradients or inputs of the backward pass.
    `forward` is the reference in torch. It is differentiated with respect to `leaves`, with the input "dy" as upstream
    gradient. `plain` is a faster torch version for the benchmark; None: `forward`. `traffic` returns the bytes that
    must be read and written by the forward op and, if there is one, by the backward op. The benchmark uses `sizes`
    (rows, width) on CPUs and `gpu_sizes` on GPUs.
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
        """Return the results and gradients of the kernels, ordered as in `reference`."""
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
    """Return the bytes of a tensor, or of all tensors in a list or dict; 0 for other values."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value
    return sum(size_of(each) for each in parts) if isinstance(value, dict | list | tuple) else 0


def times_first(*passes: float) -> Callable[[Inputs], tuple[float, ...]]:
    """Return a `traffic` function that multiplies the bytes of the first input by each of `passes`."""
    return lambda inputs: tuple(each * size_of(next(iter(inputs.values()))) for each in passes)
