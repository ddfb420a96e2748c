"""The output head's three GEMMs in fp8, as in ops/fp8.py, without a pass over the logits' gradient for its scale.

Cross entropy writes the gradient in e5m2, and its scale is known in advance: without the factor of the loss, no element
exceeds 1 (with z-loss, by very little), and the largest is close to 1 unless all targets are likely. The factor of the
loss, such as the loss scale divided by the number of targets, changes only the scale by which the GEMMs multiply.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.ops.cross_entropy import E5M2_ONE, HeadProducts
from gptlite.ops.fp8 import GRADIENT, INPUT, both_layouts, filled, kept, scaled_product, transposed


class Fp8Products(HeadProducts):
    """HeadProducts with operands in fp8. `table()` makes the table of the weight, with zeros after its first `rows`
    rows. `upstream`: the factor of the logits' gradient; None means 1."""

    def __init__(self, weight: Tensor, rows: int, table: Callable[[], Tensor], upstream: float | None) -> None:
        self.rows = rows
        self.by_row, self.by_column, self.scale = kept(weight, table)
        factor = 1.0 if upstream is None else upstream
        self.gradient_scale = torch.full((), factor / E5M2_ONE, device=weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, columns] of a chunk, and keep the chunk's other layout for `table_gradient`."""
        by_row, self.hidden_by_column, self.hidden_scale = both_layouts(hidden.contiguous(), INPUT)
        self.dtype = hidden.dtype
        return scaled_product(by_row, self.hidden_scale, self.by_row.t(), self.scale, hidden.dtype)

    def memory(self, logits: Tensor) -> Tensor:
        """Return memory for the gradient in e5m2, with zeros at the padding."""
        gradient = torch.empty_like(logits, dtype=torch.uint8)
        gradient[:, self.rows :] = 0
        return gradient.view(GRADIENT)

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a chunk's hidden states from that of its logits."""
        return scaled_product(gradient, self.gradient_scale, self.by_column.t(), self.scale, self.dtype)

    def table_gradient(self, gradient: Tensor, hidden: Tensor, dtype: torch.dtype, before: Tensor | None) -> Tensor:
        """Return a chunk's gradient of the table, added to `before`, the sum over earlier chunks, if there is one."""
        left, right = filled(transposed(gradient)), filled(self.hidden_by_column).t()
        part = scaled_product(left, self.gradient_scale, right, self.hidden_scale, dtype)
        return part if before is None else before.add_(part)
