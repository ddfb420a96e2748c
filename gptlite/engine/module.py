"""Model and data of an engine, as the configuration sees them. A checkpoint's config.yaml imports this module.

No torch at import time.
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
    """A given module, on the meta device, and `mean_loss(output, target)`, or None for the cross entropy of logits."""

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
                f"the model of this checkpoint, {config.name}, is a module of the program that trained it; "
                "build it, and load the checkpoint with gptlite.initialize(...).load(folder)"
            )
        return copy.deepcopy(self.module)

    def tied(self, config: ModuleConfig) -> dict[str, str]:
        """Return `{other name: first name}` of parameters that the module holds under several names."""
        if self.module is None:
            return {}
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}

    def loss(self, out: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the losses: the given mean times the number of targets. Raises TypeError if the mean is not
        one number."""
        if self.mean_loss is None:
            return super().loss(out, inputs)
        mean = self.mean_loss(out, inputs.targets)
        if getattr(mean, "shape", None) != ():
            found = list(mean.shape) if hasattr(mean, "shape") else type(mean).__name__
            raise TypeError(f"loss(output, target) returned {found}; return a tensor of one number, the mean")
        return mean.float() * self.count(inputs.targets)

    def count(self, targets: Tensor) -> Tensor | int:
        """Return the number of targets: all of floating-point ones, else those other than -100."""
        return (targets == targets).sum() if targets.is_floating_point() else super().count(targets)


@dataclass
class BatchesConfig(DatasetConfig):
    """Batches that a program hands over. `micro_batch_size` splits them; null: each is one micro-batch."""

    @property
    def handed_over(self) -> bool:
        """True: the sizes of the batches are those that the program gives."""
        return True


def _open(config: BatchesConfig) -> NoReturn:
    raise ConfigError("data=batches is for gptlite.initialize, whose caller hands over the batches; give another data=")


register_model(ModuleSpec())
register_data("batches", BatchesConfig, _open)
