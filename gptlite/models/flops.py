"""FLOPs of a model whose spec has no formula, counted by torch in one pass on the meta device."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gptlite.errors import first_line
from gptlite.models.capabilities import Uncounted
from gptlite.models.model import Model
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.torch_private.dispatch import TorchDispatchMode
from gptlite.torch_private.ops import tree_map

_TORCHS_OWN = ("aten", "prim", "prims", "profiler")
# Names of aten ops that do more than a few operations per element.
_PRODUCTS = re.compile(
    r"(^|_)([a-z]*mm|[a-z]*mv|v?dot|conv(olution)?(\dd)?|attention|[a-z]*rnn|lstm|gru|fft(?!_r?fftfreq)"
    r"|linalg(?!_vector_norm|_cross)|cholesky|solve|ormqr|geqrf|(c|p|euclidean_)dist|trilinear|grid_sampler)(_|$)"
)


def count_flops(model: Model, length: int, example: tuple[Any, Tensor] | None = None) -> int:
    """Return the FLOPs per token of a forward and backward pass of the whole model on one sequence of `length`.

    With an `example`, the input and the target of one sample, return the FLOPs of that sample.

    The formulas are those of torch.utils.flop_counter, including the ones that libraries have registered there. Ops
    that it ignores (elementwise ops, reductions, copies) count as zero. Attention counts as two matrix multiplications
    in the forward pass and four in the backward pass, including the masked half. Tensors are on the meta device, so no
    values are computed.

    Raises Uncounted if the pass fails, or if an op needs a formula but has none, with the name of the first such op.
    Ops of other libraries need a formula, and so do torch's matrix multiplications, convolutions, attention,
    transforms, recurrent layers, grid samplers and linear algebra.
    """
    with _Unknown() as unknown:
        try:
            with torch.device("meta"), FlopCounterMode(display=False) as counter:
                part = model.spec.build(model.config, Ops(), 0)
                x = targets = torch.zeros(1, length, dtype=torch.int64)
                if example is not None:
                    part.eval()  # batch norm cannot train on one value
                    x, targets = tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), example)
                inputs = Inputs(targets, torch.zeros(1, dtype=torch.int64))
                model.spec.forward(part, x, inputs).backward()
        except Exception as error:  # a model may raise anything, and unknown ops often cannot run without data
            if not unknown.names:  # otherwise the unknown op, reported below, explains the failure better
                reason = first_line(error) or type(error).__name__
                raise Uncounted(f"a pass on the meta device fails: {reason}; define `flops` in the spec") from error
    if unknown.names:
        raise Uncounted(f"no FLOP formula for {unknown.names[0]}; define `flops` in the spec")
    return round(counter.get_total_flops() / (length if example is None else 1))


class _Unknown(TorchDispatchMode):
    """Dispatch mode that records ops without a known FLOP formula, as `library::op`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        name = packet.__name__
        if packet not in flop_registry and (func.namespace not in _TORCHS_OWN or _PRODUCTS.search(name)):
            self.names.append(f"{func.namespace}::{name}")
        return func(*args, **(kwargs or {}))
