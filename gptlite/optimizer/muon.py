"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, made orthogonal.

Matrices inside the layers step by the nearest orthogonal matrix to their momentum, which a Newton-Schulz iteration
approaches; embeddings, the head and vectors by AdamW. A matrix that several ranks hold pieces of is orthogonalised
whole, by one of them: see gptlite.parallelism.matrix_gather.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_parameters
from gptlite.optimizer.config import MuonConfig, MuonDtype, MuonScale
from gptlite.optimizer.fused import FusedAdamW
from gptlite.optimizer.state import materialized
from gptlite.parallelism.matrix_gather import change_whole
from gptlite.parallelism.zero import local_tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: singular values come to between 0.7 and 1.2 in five steps
EPS = 1e-7


@dataclass(frozen=True)
class Stack:
    """A matrix [groups x count x n, columns] that is `count` matrices [groups x n, columns], dealt out in groups.

    The fused QKV projection is three, its groups the heads.
    """

    groups: int = 1
    count: int = 1

    def split(self, matrix: Tensor) -> Tensor:
        """[count, groups x n, columns]"""
        rows = matrix.view(self.groups, self.count, -1, matrix.shape[1])
        return rows.transpose(0, 1).reshape(self.count, -1, matrix.shape[1])

    def join(self, matrices: Tensor) -> Tensor:
        """The other way."""
        rows = matrices.view(self.count, self.groups, -1, matrices.shape[2])
        return rows.transpose(0, 1).reshape(-1, matrices.shape[2])


def build(config: MuonConfig, context: BuildContext) -> Muon:
    """The optimizer of a configuration."""
    names = [name for group in context.groups for name in group["names"]]
    stacks = {name: Stack(*sizes) for name in names for end, sizes in context.stacked.items() if name.endswith(end)}
    kind, betas = FusedAdamW if context.fused_adam else AdamW, (config.beta1, config.beta2)
    adamw = partial(kind, lr=config.lr, betas=betas, eps=config.eps, **context.kernels)
    return Muon(context.groups, config, stacks, adamw)


def group_keys(edges: tuple[str, ...], name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Whether Muon steps a parameter itself."""
    return {"muon": parameter.ndim == 2 and not name.endswith(edges)}


class Muon(OwnOptimizer):
    """Groups with `muon` hold the matrices, the others are given to `adamw`, whose rate is `adamw_lr_ratio` of theirs.

    `stacks` says which parameters, by name, are several matrices. With the scale `match_rms_adamw` updates are as large
    as AdamW's are, 0.2 sqrt(max(rows, columns)) times the orthogonal matrix (Liu et al. 2025, arXiv:2502.16982,
    section 2.2), else sqrt(max(1, rows / columns)) times it, as Jordan has them.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: MuonConfig,
        stacks: Mapping[str, Stack],
        adamw: Callable[[list[dict[str, Any]]], AdamW],
    ) -> None:
        rule = {"momentum": config.momentum, "nesterov": config.nesterov}
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0, **rule})
        self.config, self.stacks = config, stacks
        self._matrices = {id(p) for group in self.param_groups if group["muon"] for p in group["params"]}
        others = [{key: group[key] for key in ("params", "weight_decay")} for group in self._others()]
        self.adamw = adamw(others) if others else None
        if self.adamw is not None:
            self.adamw.state = self.state

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A momentum for matrices, AdamW's state for the others."""
        if id(parameter) in self._matrices:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        assert self.adamw is not None
        return materialized(self.adamw, parameter)

    def update(self) -> None:
        """Takes a step."""
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        if self.adamw is not None:
            for mine, its in zip(self._others(), self.adamw.param_groups, strict=True):
                its["lr"] = mine["lr"] * self.config.adamw_lr_ratio
            self.adamw.step()

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["muon"]]

    def _step_matrices(self, group: dict[str, Any]) -> None:
        named = zip(group["names"], group["params"], strict=True)
        found = [(name, parameter) for name, parameter in named if parameter.grad is not None]
        if not found:
            return
        updates = [self._momentum(group, parameter) for _, parameter in found]
        stacks = [self.stacks.get(name, Stack()) for name, _ in found]
        change_whole(updates, lambda index, whole: self.orthogonal_update(whole, stacks[index]))
        weights = local_parameters(parameter for _, parameter in found)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, [local_tensor(update) for update in updates], alpha=-group["lr"])

    def _momentum(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """What is to be made orthogonal; cut as the parameter is."""
        assert parameter.grad is not None
        momentum, gradient = self.state_of(parameter)["momentum_buffer"], local_tensor(parameter.grad)
        local_tensor(momentum).lerp_(gradient, 1 - group["momentum"])
        update = momentum.clone()
        if group["nesterov"]:
            local_tensor(update).lerp_(gradient, 1 - group["momentum"])
        return update

    def orthogonal_update(self, whole: Tensor, stack: Stack) -> Tensor:
        """[rows, columns] -> the same, each of its matrices orthogonal, and scaled."""
        matrices = stack.split(whole)
        rows, columns = matrices.shape[1:]
        match_rms_adamw = self.config.scale is MuonScale.match_rms_adamw
        scale = 0.2 * max(rows, columns) ** 0.5 if match_rms_adamw else max(1.0, rows / columns) ** 0.5
        dtype = torch.bfloat16 if self.config.newton_schulz_dtype is MuonDtype.bf16 else torch.float32
        orthogonal = newton_schulz(matrices.to(dtype), self.config.newton_schulz_steps)
        return stack.join(orthogonal.to(whole.dtype) * scale)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """[..., n, m] -> about U Vᵀ of its singular value decomposition U S Vᵀ; zeros stay."""
    a, b, c = QUINTIC
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    if x.dtype in (torch.float32, torch.float64):
        for _ in range(steps):
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
        return x.mT if tall else x
    x = x.reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        # The sums inside the products, which are in fp32: rounding each to 16 bits doubles the error of a call.
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)
