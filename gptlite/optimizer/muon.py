"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): orthogonalized momentum.

Matrices inside the layers step by the orthogonal matrix nearest to their momentum, approximated by a Newton-Schulz
iteration. Embeddings, the head and vectors are stepped by AdamW. If a matrix is sharded over ranks, one of them
orthogonalizes the whole matrix: see gptlite.parallelism.matrix_gather.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters
from gptlite.optimizer.config import MuonConfig, MuonDtype, MuonScale, NewtonSchulz
from gptlite.optimizer.fused import FusedAdamW
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import cut_like, local_tensor
from gptlite.parallelism.matrix_gather import change_whole
from gptlite.torch_private.ops import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_

Coefficients = tuple[float, float, float]  # of s, s³ and s⁵, for a singular value s
QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: after five steps, singular values are about 0.7 to 1.2
# Polar Express (Amsel et al. 2025, arXiv:2505.16932): the best polynomial for each step. After five steps, singular
# values that were above 0.001 are 0.85 to 1.15. The first step has a margin of 1% for values rounded to above 1.
POLAR_EXPRESS = (
    (8.0758, -21.8221, 15.1082),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
CONVERGED = (1.875, -1.25, 0.375)  # for further steps of Polar Express
EPS = 1e-7


@dataclass(frozen=True)
class Stack:
    """Layout of a parameter [groups x sum(sizes) x n, columns] that interleaves, group by group, the rows of several
    matrices [groups x size x n, columns].

    The fused QKV projection consists of three matrices, and has one group per key/value head.
    """

    groups: int = 1
    sizes: tuple[int, ...] = (1,)

    def matrices(self, stacked: Tensor) -> list[Tensor]:
        """Return views of the matrices, [groups, size x n, columns] each. For `stacked` [experts, rows, columns],
        return those of each expert in turn."""
        if stacked.ndim == 3:
            return [matrix for each in stacked for matrix in self.matrices(each)]
        each = stacked.view(self.groups, sum(self.sizes), -1, stacked.shape[-1])
        return [part.flatten(1, 2) for part in each.split(self.sizes, 1)]


def build(config: MuonConfig, context: BuildContext) -> Muon:
    """Return the optimizer of a configuration."""
    names = [name for group in context.groups for name in group["names"]]
    stacks = {name: Stack(*sizes) for name in names for end, sizes in context.stacked.items() if name.endswith(end)}
    kind, betas = FusedAdamW if context.fused_adam else AdamW, (config.beta1, config.beta2)
    adamw = partial(kind, lr=config.lr, betas=betas, eps=config.eps, **context.kernels)
    bf16 = config.newton_schulz_dtype is MuonDtype.bf16
    if config.newton_schulz_dtype is MuonDtype.auto:
        bf16 = context.dtype is torch.bfloat16
    return Muon(context.groups, config, stacks, adamw, torch.bfloat16 if bf16 else torch.float32)


def group_keys(edges: tuple[str, ...], batched: tuple[str, ...], name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return `{"muon": True}` for a parameter that Muon itself updates, and `{"muon": False}` if AdamW updates it."""
    matrix = parameter.ndim == 2 and not name.endswith(edges)
    return {"muon": matrix or (parameter.ndim == 3 and name.endswith(batched))}


class Muon(OwnOptimizer):
    """Muon for the groups whose `muon` is True. AdamW steps the others, at `adamw_lr_ratio` times their learning rate.

    `stacks` maps the name of a parameter that consists of several matrices to its Stack; `adamw` creates the AdamW
    optimizer; `dtype` is that of the Newton-Schulz iteration. With the scale `match_rms_adamw`, updates have the RMS of
    AdamW's: 0.2 sqrt(max(rows, columns)) times the orthogonal matrix (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    Jordan's original scale is sqrt(max(1, rows / columns)).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: MuonConfig,
        stacks: Mapping[str, Stack],
        adamw: Callable[[list[dict[str, Any]]], AdamW],
        dtype: torch.dtype,
    ) -> None:
        rule = {"momentum": config.momentum, "nesterov": config.nesterov}
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0, **rule})
        self.config, self.stacks, self.dtype = config, stacks, dtype
        self._matrices = {id(p) for group in self.param_groups if group["muon"] for p in group["params"]}
        others = [{key: group[key] for key in ("params", "weight_decay")} for group in self._others()]
        self.adamw = adamw(others) if others else None
        if self.adamw is not None:
            self.adamw.state = self.state  # shared, so that checkpoints contain both states
        self.skips_on_device = self.adamw is None or isinstance(self.adamw, FusedAdamW)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a momentum for a matrix, AdamW's state for other parameters."""
        if id(parameter) in self._matrices:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        assert self.adamw is not None
        return materialized(self.adamw, parameter)

    def update(self) -> None:
        """Take a step, unless the scalar tensor in the attribute `found_inf` is not 0."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group, found_inf)
        if self.adamw is not None:
            for mine, its in zip(self._others(), self.adamw.param_groups, strict=True):
                its["lr"] = mine["lr"] * self.config.adamw_lr_ratio
            self.adamw.step(**({} if found_inf is None else {"found_inf": found_inf}))

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["muon"]]

    def _step_matrices(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        named = zip(group["names"], group["params"], strict=True)
        ready = [(name, parameter) for name, parameter in named if parameter.grad is not None]
        if not ready:
            return
        updates = self._momenta(group, [parameter for _, parameter in ready], found_inf)
        stacks = [self.stacks.get(name, Stack()) for name, _ in ready]
        # A collective call, even if this rank has no matrix to orthogonalize.
        change_whole(updates, partial(self._orthogonal, stacks))
        weights = local_parameters(parameter for _, parameter in ready)
        changes, rate = [local_tensor(update) for update in updates], group["lr"]
        if found_inf is None:
            foreach_mul_(weights, 1 - rate * group["weight_decay"])
            foreach_add_(weights, changes, alpha=-rate)
            return
        rate = rate * (1 - found_inf.double())  # 0 in a step that is skipped
        foreach_mul_(weights, (1 - rate * group["weight_decay"]).float())
        foreach_mul_(changes, -rate.float())
        foreach_add_(weights, changes)

    def _momenta(
        self, group: dict[str, Any], parameters: Sequence[nn.Parameter], found_inf: Tensor | None
    ) -> list[Tensor]:
        """Update the momenta and return the matrices to orthogonalize, sharded like the parameters."""
        buffers, gradients = self.local_states(parameters, "momentum_buffer"), local_gradients(parameters)
        if found_inf is not None:  # moving momenta towards themselves changes nothing
            for buffer, gradient in zip(buffers, gradients, strict=True):
                torch.where(found_inf != 0, buffer, gradient, out=gradient)
        foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        weight = 1 - group["momentum"] if group["nesterov"] else 0.0
        updates = foreach_lerp(buffers, gradients, weight)
        return [cut_like(parameter, update) for parameter, update in zip(parameters, updates, strict=True)]

    def _orthogonal(self, stacks: Sequence[Stack], wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the scaled update of each whole parameter, in which each matrix of its stack is orthogonalized.
        Matrices of equal shape are processed in one batch, with tall ones transposed."""
        updates = {index: torch.empty_like(whole) for index, whole in wholes.items()}
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for index, whole in wholes.items():
            pairs = zip(*(stacks[index].matrices(tensor) for tensor in (whole, updates[index])), strict=True)
            for source, target in pairs:
                shape = source.shape[0] * source.shape[1], source.shape[2]
                alike.setdefault(tuple(sorted(shape)), []).append((source, target))
        for shape, pairs in alike.items():
            x = pairs[0][0].new_empty(len(pairs), *shape, dtype=self.dtype)
            for tensor, (source, _) in zip(x, pairs, strict=True):
                matrix = source.reshape(-1, source.shape[2])
                tensor.copy_(matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix)
            for tensor, (_, target) in zip(newton_schulz(x, coefficients(self.config)), pairs, strict=True):
                rows, columns = target.shape[0] * target.shape[1], target.shape[2]
                target.copy_((tensor.mT if rows > columns else tensor).reshape(target.shape)).mul_(
                    self._scale(rows, columns)
                )
        return updates

    def _scale(self, rows: int, columns: int) -> float:
        match_rms_adamw = self.config.scale is MuonScale.match_rms_adamw
        return 0.2 * max(rows, columns) ** 0.5 if match_rms_adamw else max(1.0, rows / columns) ** 0.5


def coefficients(config: MuonConfig) -> list[Coefficients]:
    """Return the coefficients of each step of the configured iteration."""
    steps = config.newton_schulz_steps
    if config.newton_schulz is NewtonSchulz.quintic:
        return [QUINTIC] * steps
    return [*POLAR_EXPRESS, *[CONVERGED] * steps][:steps]


def newton_schulz(x: Tensor, steps: Iterable[Coefficients]) -> Tensor:
    """Return an approximation of U Vᵀ for x [..., n, m] with the singular value decomposition U S Vᵀ. A zero matrix
    stays zero."""
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]  # to compute the smaller one of x xᵀ and xᵀ x
    x = x.mT if tall else x
    # The Frobenius norm bounds the largest singular value, and the iteration converges for values up to 1.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    if x.dtype in (torch.float32, torch.float64):
        for a, b, c in steps:
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
        return x.mT if tall else x
    x = x.reshape(-1, *x.shape[-2:])
    for a, b, c in steps:
        square = torch.bmm(x, x.mT)
        # baddbmm adds in fp32. Rounding the product to 16-bit precision before the addition would double the error.
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)
