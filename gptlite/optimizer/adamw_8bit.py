"""AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), by torchao's tensors and its update.

A moment is cut into blocks of 256 elements of what a rank holds; each element is a code, one of 256 numbers in [-1, 1]
that are closest together near 0, times the largest size in its block. Tensors that torchao would leave alone, below
4,096 elements or of no whole number of blocks, have fp32 moments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters, step_count
from gptlite.optimizer.config import BLOCK_8BIT, AdamW8bitConfig, in_8_bits
from gptlite.parallelism.boxes import cut_like
from gptlite.parallelism.zero import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**20  # elements stepped at a time where nothing is compiled: bounds the memory of a step


def build(config: AdamW8bitConfig, context: BuildContext) -> AdamW8bit:
    """The optimizer of a configuration."""
    return AdamW8bit(context.groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


class AdamW8bit(OwnOptimizer):
    """Other ranks are not asked. State is kept in the form of the local tensors; checkpoints have it in fp32."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._maps: dict[tuple[bool, torch.device], Tensor] = {}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A count, and two moments of what this rank holds."""
        local = local_tensor(parameter)
        moments = {key: self._zeros(local, signed=key == "exp_avg") for key in MOMENTS}
        return {"step": step_count(), **moments}

    def stored(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state in fp32, cut as the parameter is: copies."""
        state = self.state_of(parameter)
        return {"step": state["step"]} | {key: cut_like(parameter, _wide(state[key])) for key in MOMENTS}

    def take(self, parameter: Tensor, stored: dict[str, Tensor]) -> None:
        """Brings what was written into `stored` back into 8 bits; what came from there is the same to the bit."""
        state = self.state_of(parameter)
        for key in MOMENTS:
            state[key].copy_(local_tensor(stored[key]))

    def update(self) -> None:
        """Takes a step."""
        for group in self.param_groups:
            parameters = self.ready(group)
            self.counted(parameters)
            (beta1, beta2), lr = group["betas"], torch.tensor(float(group["lr"]))
            for parameter, weight, gradient in zip(
                parameters, local_parameters(parameters), local_gradients(parameters), strict=True
            ):
                state = self.state[parameter]
                rule = (None, lr, beta1, beta2, group["weight_decay"], group["eps"], True, False)
                if weight.is_cuda:
                    with torch._dynamo.utils.disable_cache_limit():
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
        """The numbers that codes stand for, [256]; one tensor for all moments of a kind.

        torchao's signed ones end at 1 and -0.993. Here it is -1, so that the largest of a block is stored as it is
        whatever its sign, and what was read from 8 bits goes back to the same codes and scale.
        """
        if (signed, device) not in self._maps:
            numbers = list(_torchao().codes(signed))
            if signed:
                numbers[0] = -1.0
            self._maps[signed, device] = torch.tensor(numbers, device=device)
        return self._maps[signed, device]


def _wide(moment: Tensor) -> Tensor:
    """A moment's elements in fp32: a copy."""
    return moment.clone() if type(moment) is Tensor else moment.dequantize()


def _piece(tensor: Tensor, start: int) -> Tensor:
    """PIECE elements from one on, in the tensor's own memory."""
    if type(tensor) is Tensor:
        return tensor.view(-1)[start : start + PIECE]
    its: Any = tensor
    scale = its.scale[start // BLOCK_8BIT : (start + PIECE) // BLOCK_8BIT]
    return _torchao().state(_piece(its.codes, start), scale, its.qmap, its.signed, dtype=torch.float32)


class _Parts:
    """What is used of torchao: its 8-bit tensor, the numbers of its codes, and its update of one parameter."""

    def __init__(self) -> None:
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))  # of libraries for GPUs that are not here
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
