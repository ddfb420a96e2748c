"""Entries of the model and data registries for an engine, whose checkpoints list this module as a plugin.

It does not import torch at import time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.errors import ConfigError
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops


@dataclass
class ModuleConfig(ModelConfig):
    """Module given to `gptlite.initialize`: the name of its class, and the number of children of an nn.Sequential."""

    name: str = "module"
    peak_lr: float = 0.001
    num_blocks: int | None = None


class ModuleSpec(ModelSpec[ModuleConfig]):
    """Spec of a given module, which is on the meta device. `mean_loss(output, target)` returns its loss; None means the
    cross entropy of logits."""

    name = "module"
    schema = ModuleConfig
    reads = "samples"

    def __init__(self, module: nn.Module | None = None, mean_loss: Callable[[Any, Any], Any] | None = None) -> None:
        self.module, self.mean_loss = module, mean_loss
        if mean_loss is None:
            self.metrics = ("accuracy",)

    def num_blocks(self, config: ModuleConfig) -> int | None:
        """Return the number of children of an nn.Sequential; None for another module."""
        return config.num_blocks

    def build(self, config: ModuleConfig, ops: Ops, seed: int) -> nn.Module:
        """Return a copy of the module."""
        if self.module is None:
            raise ConfigError(
                f"the model of this checkpoint, {config.name}, is defined in the program that trained it; "
                "build it there, and load the checkpoint with gptlite.initialize(...).load(folder)"
            )
        return copy.deepcopy(self.module)

    def tied(self, config: ModuleConfig) -> dict[str, str]:
        """Return `{other name: first name}` for parameters that the module holds under several names."""
        if self.module is None:
            return {}
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}

    def loss(self, out: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the losses: the mean loss times the number of targets. Raises TypeError if the mean loss is
        not a scalar tensor."""
        if self.mean_loss is None:
            return super().loss(out, inputs)
        mean = self.mean_loss(out, inputs.targets)
        if getattr(mean, "shape", None) != ():
            found = f"shape {list(mean.shape)}" if hasattr(mean, "shape") else type(mean).__name__
            raise TypeError(f"loss(output, target) returned {found}; return a scalar tensor (shape []): the mean loss")
        return mean.float() * self.count(inputs.targets)

    def count(self, targets: Tensor) -> Tensor | int:
        """Return the number of targets to average over: for floating-point targets, all elements except NaN; for
        others, all elements except -100."""
        return (targets == targets).sum() if targets.is_floating_point() else super().count(targets)


@dataclass
class BatchesConfig(DatasetConfig):
    """Batches that a program passes to an engine. They are split into micro-batches of `micro_batch_size`; if that key
    is null, each batch is one micro-batch."""

    @property
    def handed_over(self) -> bool:
        """True, since the program determines the sizes of the batches."""
        return True


def _open(config: BatchesConfig) -> NoReturn:
    raise ConfigError(
        "data=batches works only in gptlite.initialize, whose caller passes the batches; set another data="
    )


register_model(ModuleSpec())
register_data("batches", BatchesConfig, _open)
