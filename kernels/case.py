"""What a case of an op is: made-up arguments, the kernels on them, and the same in torch's own ops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors by name, lists of them, None
Tensors = tuple[Tensor, ...]
Results = tuple[Tensors, Tensors]  # of the forward op, of the backward op
Sizes = tuple[tuple[int, int], ...]
Traffic = Callable[[Inputs], tuple[float, ...]]  # bytes forward and, where that is an op of its own, backward


@dataclass(frozen=True)
class Case:
    """One op or a pair of them.

    `kernel` and `kernel_backward` call the kernels, the second on what the first returned and `between` made of it; an
    op that makes its gradient in the forward pass has no second. Of what the first returned `compared` tensors (None:
    all) are results, the others are for the backward pass. `forward` is torch's and is differentiated with respect to
    `leaves`, the upstream gradient being the input named "dy"; `plain` is what torch has for it where `forward` is only
    a definition. `traffic`: the bytes that must travel in each direction. `sizes` are a CPU's, `gpu_sizes` a GPU's.
    """

    ops: tuple[str, ...]
    make: Callable[[int, int, torch.dtype, torch.device], Inputs]
    kernel: Callable[[Inputs], Tensors]
    kernel_backward: Callable[[Inputs, Tensors], Tensors] | None
    forward: Callable[[Inputs], Tensors]
    leaves: tuple[str, ...]
    sizes: Sizes
    gpu_sizes: Sizes
    traffic: Traffic
    plain: Callable[[Inputs], Tensors] | None = None
    between: Callable[[Inputs, Tensors], Tensors] = lambda inputs, results: results
    compared: int | None = 1
    cpu_only: bool = False

    def ours(self, inputs: Inputs) -> Results:
        """What the kernels return, as torch would."""
        results = self.between(inputs, self.kernel(inputs))
        backward = self.kernel_backward(inputs, results) if self.kernel_backward else ()
        if self.leaves and self.kernel_backward is None:
            return results[: self.compared], results[self.compared :]
        return results[: self.compared], backward

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


def ops() -> Any:
    """The kernels, as torch has them."""
    return torch.ops.gptlite


def size_of(value: Any) -> int:
    """Bytes of a tensor, of a list or of named ones."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = value.values() if isinstance(value, dict) else value
    return sum(size_of(each) for each in parts) if isinstance(value, dict | list | tuple) else 0


def times(*passes: float) -> Traffic:
    """So many times the bytes of the first input."""
    return lambda inputs: tuple(each * size_of(next(iter(inputs.values()))) for each in passes)


def pair(name: str) -> tuple[str, str]:
    """The names of an op and its backward."""
    return name, f"{name}_backward"
