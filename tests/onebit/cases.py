"""Functions that tests run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from distributed.cells.steps import built
from numpy.typing import NDArray
from torch import Tensor, nn

from gptlite.config import Config
from gptlite.parallelism.axes import AXES
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.monitor.replicas import check_replicas
from gptlite.satellites.onebit.reduction import OneBitReduction
from gptlite.satellites.parity.gather import gather
from gptlite.trainer.state import TrainState


@dataclass
class Seen:
    """What a rank has seen of a run: the parts of parameters that it exchanges, and in each step its own gradients of
    them, or in dense steps the summed ones on the first rank and zeros on the others."""

    first: dict[str, NDArray]
    vectors: list[list[str]]
    lane: int
    line: str  # the same on ranks that exchange the same values
    gradients: list[dict[str, NDArray]] = field(default_factory=list)
    results: list[tuple[float, float, float]] = field(default_factory=list)  # loss, norm, learning rate
    after: list[dict[str, dict[str, NDArray]]] = field(default_factory=list)  # x, m and errors after each step
    sent: list[int] = field(default_factory=list)
    apart: list[bool] = field(default_factory=list)  # after each step
    mean: list[dict[str, float]] = field(default_factory=list)  # of each whole v without zeros, on rank 0


def steps(config: Config, count: int) -> Seen:
    """A run's steps, after each of which the copies of all parameters are compared."""
    with built(config) as (mesh, state, step):
        reduction = state.runner.mesh.reduction
        assert isinstance(reduction, OneBitReduction)
        exchange = reduction.exchange
        vectors = [vector.names for vector in exchange.vectors]
        seen = Seen(_parts(reduction, state), vectors, exchange.lane, _line(mesh, reduction))
        plain = reduction.gradient_square

        def recorded(counted: Iterable[nn.Parameter], dense: Callable[[], Tensor]) -> Tensor:
            keeps, result = reduction._keeps(), plain(counted, dense)
            seen.gradients.append(_gradients(reduction, state, keeps))
            return result

        with mock.patch.object(reduction, "gradient_square", recorded):
            for _ in range(count):
                before = reduction.exchange.counted.sent
                result = step(state)
                seen.results.append((result.loss, result.grad_norm, result.lr))
                seen.sent.append(reduction.exchange.counted.sent - before)
                assert seen.sent[-1] in (0, exchange.bytes()[0])
                seen.after.append(
                    {
                        "x": _parts(reduction, state),
                        "m": _parts(reduction, state, lambda p: state.optimizer.state[p]["exp_avg"]),
                        "errors": _errors(reduction),
                    }
                )
                seen.apart.append(reduction.apart)
                seen.mean.append(_means(state))
                if not reduction.apart:
                    check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
    return seen


def _means(state: TrainState) -> dict[str, float]:
    """The mean of each parameter's second moments that are not 0, on rank 0."""
    moments = {name: state.optimizer.state[p]["exp_avg_sq"] for name, p in state.named_parameters()}
    whole = gather(moments.items()) or {}
    return {
        name: float(each.value.double().sum() / max(1, int((each.value != 0).sum()))) for name, each in whole.items()
    }


def _line(mesh: Mesh, reduction: OneBitReduction) -> str:
    axes = [axis for axis in AXES if axis != reduction.exchange.axis]
    return " ".join(f"{axis}{mesh.coordinate(axis)}" for axis in axes)


def _errors(reduction: OneBitReduction) -> dict[str, NDArray]:
    return {
        name: _numpy(view)
        for vector in reduction.exchange.vectors
        if vector.errors is not None
        for name, view in zip(vector.names, vector.views(vector.errors), strict=True)
    }


def _numpy(tensor: Tensor) -> NDArray:
    return tensor.detach().to(torch.float64).numpy().copy()


def _parts(
    reduction: OneBitReduction, state: TrainState, of: Callable[[Any], Tensor] = lambda p: p
) -> dict[str, NDArray]:
    """What is exchanged of every parameter, or of another tensor of it."""
    exchange, names = reduction.exchange, {id(p): name for name, p in state.named_parameters()}
    return {names[id(p)]: _numpy(exchange._gathered(p, local_tensor(of(p)).detach())) for p in exchange.parameters}


def _gradients(reduction: OneBitReduction, state: TrainState, keeps: bool) -> dict[str, NDArray]:
    if not keeps:
        summed = _parts(reduction, state, lambda p: p.grad)
        return summed if reduction.exchange.lane == 0 else {name: 0 * g for name, g in summed.items()}
    names = {id(p): name for name, p in state.named_parameters()}
    return {names[id(p)]: _numpy(reduction.exchange.gradient(p)) for p in reduction.exchange.parameters}  # type: ignore[arg-type]
