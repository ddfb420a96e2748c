"""Seam at which a satellite replaces FSDP2's sums of gradients over the data ranks, for example by compressed ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

PREFIX = "errors."  # of the checkpoint keys of a reduction's state


class Reduction:
    """Sums of gradients over the data ranks of a run. This base class leaves them to FSDP2.

    apart: True while data ranks have steps of their own behind them, so that copies differ until `settle`.
    """

    apart = False

    def attach(self, module: FSDPModule) -> None:
        """Replace the sums of a module that `zero.shard` has sharded along `dp_shard` alone.

        FSDP2's custom reduce-scatter sums over that axis, if it has more than one rank, and its all-reduce hook then
        has to sum over `dp_replicate`. Called before the parameters have values.
        """

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Receive this rank's parameters, by global name, and the optimizer, once they exist."""

    def complete(self, losses: Sequence[Tensor], zero: Tensor) -> Tensor:
        """Complete the gradients after a step's last backward pass, and return this rank's share of the loss, a scalar:
        the sum of `zero`, a scalar on the device, and its shares of micro-batches."""
        return sum(losses, zero)

    def gradient_square(self, counted: Iterable[nn.Parameter], dense: Callable[[], Tensor]) -> Tensor:
        """Return this rank's share of the squared gradient norm, fp64. `dense()` is the share of the `counted`
        parameters, which takes their gradients as summed over the data ranks."""
        return dense()

    def settle(self) -> None:
        """Make copies of parameters and optimizer state equal, before they are evaluated or stored. Collective."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that checkpoints store, under keys that begin with PREFIX."""
        return {}

    def requested(self, stored: Collection[str]) -> dict[str, Tensor]:
        """Return tensors to fill from a checkpoint whose keys of this kind are `stored`, which any layout may have
        written. Collective, as is `take`."""
        return {}

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Apply the result of `requested` once it is filled. Returns notes to print."""
        return []
