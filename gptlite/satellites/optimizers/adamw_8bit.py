"""AdamW with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861), using torchao's tensors and update function.

A rank's shard of a moment is divided into blocks of 256 elements. Each element is stored as a code for one of 256
numbers in [-1, 1], which are densest near 0; the element's value is this number times the absolute maximum of the
block. As in torchao, tensors with fewer than 4,096 elements or with an incomplete block have fp32 moments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters, step_count
from gptlite.parallelism.boxes import cut_like, local_tensor
from gptlite.satellites.optimizers.configs import AdamW8bitConfig
from gptlite.satellites.optimizers.torchao import BLOCK_8BIT, in_8_bits
from gptlite.torch_private.dynamo import a_graph_for_each_shape

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**20  # elements stepped at a time in eager mode: bounds the memory of a step


def build(config: AdamW8bitConfig, context: BuildContext) -> AdamW8bit:
    """Return the optimizer of a configuration."""
    return AdamW8bit(context.groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


class AdamW8bit(OwnOptimizer):
    """AdamW on local tensors, without communication. State is quantized; checkpoints store it in fp32."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._maps: dict[tuple[bool, torch.device], Tensor] = {}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a step count and two moments of this rank's shard."""
        local = local_tensor(parameter)
        moments = {key: self._zeros(local, signed=key == "exp_avg") for key in MOMENTS}
        return {"step": step_count(), **moments}

    def stored(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return copies of the state in fp32, sharded like the parameter."""
        state = self.state_of(parameter)
        return {"step": state["step"]} | {key: cut_like(parameter, _wide(state[key])) for key in MOMENTS}

    def take(self, parameter: Tensor, stored: dict[str, Tensor]) -> None:
        """Quantize the values in `stored` into the state. Unchanged values of `self.stored` give the same bits."""
        state = self.state_of(parameter)
        for key in MOMENTS:
            state[key].copy_(local_tensor(stored[key]))

    def update(self) -> None:
        """Take a step."""
        for group in self.param_groups:
            parameters = self.ready(group)
            self.counted(parameters)
            # A tensor, since torch.compile treats a float as a constant.
            (beta1, beta2), lr = group["betas"], torch.tensor(float(group["lr"]))
            for parameter, weight, gradient in zip(
                parameters, local_parameters(parameters), local_gradients(parameters), strict=True
            ):
                state = self.state[parameter]
                # No AMSGrad; AdamW rather than Adam; no stochastic rounding.
                rule = (None, lr, beta1, beta2, group["weight_decay"], group["eps"], True, False)
                if weight.is_cuda:
                    with a_graph_for_each_shape():
                        _compiled()(weight, gradient, state["step"], *(state[key] for key in MOMENTS), *rule)
                    continue
                for start in range(0, weight.numel(), PIECE):
                    piece = partial(_piece, start=start)
                    moments = (piece(state[key]) for key in MOMENTS)
                    _torchao().adam(piece(weight), piece(gradient), state["step"], *moments, *rule)

    def _zeros(self, local: Tensor, signed: bool) -> Tensor:
        if not in_8_bits(local.numel()):
            return torch.zeros_like(local, dtype=torch.float32)
        codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
        scale = torch.zeros(local.numel() // BLOCK_8BIT, device=local.device)
        return _torchao().state(codes, scale, self._map(signed, local.device), signed, dtype=torch.float32)

    def _map(self, signed: bool, device: torch.device) -> Tensor:
        """Return the value of each code [256]. All moments of a kind share one tensor.

        torchao's signed values range from -0.993 to 1. Here the lowest is -1, so that the absolute maximum of a block
        is exact for both signs, and dequantized values quantize to the same codes and scale.
        """
        if (signed, device) not in self._maps:
            numbers = list(_torchao().codes(signed))
            if signed:
                numbers[0] = -1.0
            self._maps[signed, device] = torch.tensor(numbers, device=device)
        return self._maps[signed, device]


def _wide(moment: Tensor) -> Tensor:
    """Return a copy of a moment in fp32."""
    return moment.clone() if type(moment) is Tensor else moment.dequantize()


def _piece(tensor: Tensor, start: int) -> Tensor:
    """Return a view of PIECE elements from `start` on."""
    if type(tensor) is Tensor:
        return tensor.view(-1)[start : start + PIECE]
    its: Any = tensor
    scale = its.scale[start // BLOCK_8BIT : (start + PIECE) // BLOCK_8BIT]
    return _torchao().state(_piece(its.codes, start), scale, its.qmap, its.signed, dtype=torch.float32)


class _Parts:
    """Imported parts of torchao: its 8-bit tensor, the values of its codes, and its update of one parameter."""

    def __init__(self) -> None:
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))  # torchao warns about missing GPU libraries
        try:
            from torchao.optim.adam import single_param_adam
            from torchao.optim.quant_utils import create_dynamic_map
            from torchao.optim.subclass_8bit import OptimState8bit
        finally:
            logging.disable(before)
        self.state: Any = OptimState8bit
        self.codes: Callable[[bool], list[float]] = create_dynamic_map
        self.adam: Callable[..., None] = single_param_adam


@cache
def _torchao() -> _Parts:
    return _Parts()


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_torchao().adam, fullgraph=True, dynamic=False)
