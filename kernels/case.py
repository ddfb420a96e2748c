"""A case of an op: made-up arguments, the kernels on them, and the same in torch's own ops."""

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
    """One op or a pair of them.

    `kernel` and `kernel_backward` call the kernels, the second on what the first returned and `between` made of it; an
    op that makes its gradient in the forward pass has no second. Of what the first returned `compared` tensors (None:
    all) are results, the others are for the backward pass. `forward` is torch's and is differentiated with respect to
    `leaves`, the upstream gradient being the input named "dy"; `plain` is what torch has for it where `forward` is only
    a definition. `traffic`: the bytes that must travel forward and, where that is an op of its own, backward. `sizes`
    are a CPU's, `gpu_sizes` a GPU's.
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
        """What the kernels return, as torch would."""
        results = self.between(inputs, self.kernel(inputs))
        if self.kernel_backward:
            return results[: self.compared], self.kernel_backward(inputs, results)
        return results[: self.compared], results[self.compared :] if self.leaves else ()

    def reference(self, inputs: Inputs) -> Results:
        """Torch's results and gradients, in the inputs' dtypes."""
        return differentiate(self.forward, inputs, self.leaves)


def differentiate(forward: Callable[[Inputs], Tensors], inputs: Inputs, leaves: tuple[str, ...]) -> Results:
    """Results of a function of the inputs, and its gradients for "dy"."""
    if not leaves:
        return forward(inputs), ()
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
    results = forward(inputs)
    gradients = torch.autograd.grad(results[0], [inputs[name] for name in leaves], inputs["dy"])
    return tuple(result.detach() for result in results), gradients


def size_of(value: Any) -> int:
    """Bytes of a tensor, of a list or of named ones."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value
    return sum(size_of(each) for each in parts) if isinstance(value, dict | list | tuple) else 0
