"""ModelSpec: base class of the specs of plug-ins, with defaults for a plain nn.Module.

A new model consists of a configuration dataclass, a module and a subclass of ModelSpec. `build` is required, and also
`loss` if it is not the cross entropy of logits. The other methods have defaults for a plain nn.Module
(gptlite.models.plain). gptlite.models.base describes what each method returns. Importing a spec must not import torch.

Training a GPT imports neither this module nor gptlite.models.plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gptlite.models.base import BaseSpec, C, Constant, Cut, Matrices, Normal, builds_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.mesh import Mesh

__all__ = ("Constant", "Cut", "Matrices", "ModelSpec", "Normal")


class ModelSpec(BaseSpec[C]):
    """Spec of a plain nn.Module, whose blocks, tied parameters, initial values, buffers and embeddings are found in the
    module. It has the capabilities `PlainModule` and `BatchNorms`."""

    @builds_model
    def num_blocks(self, config: C) -> int | None:
        """Build the model on the meta device and return the number of children of an nn.Sequential; None for any other
        module."""
        from gptlite.models.plain import count_blocks

        return count_blocks(self, config)

    def build(self, config: C, ops: Ops, seed: int) -> nn.Module:
        """Build the whole model on the default device, which is the meta device in a run. `seed` keys dropout."""
        raise NotImplementedError(f"{type(self).__name__} does not define `build`")

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """Return the children of an nn.Sequential, or the elements of all outermost nn.ModuleLists."""
        from gptlite.models.plain import blocks_of

        return blocks_of(part)

    def forward(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Call the module with x (`**x` for a dict, `*x` for a tuple) and return `loss` of its output."""
        from gptlite.models.plain import call, has_end

        out = call(part, x)
        return self.loss(out, inputs) if has_end(part) else out

    def loss(self, out: Any, inputs: Inputs) -> Tensor:
        """Return the fp32 sum of the losses of the module's output, by default the cross entropy of logits [B, ...,
        classes].

        If the spec declares `metrics`, this method stores the sum of each metric over the micro-batch, a number or a
        scalar tensor, in the dict `inputs.metrics`. The sums are divided by `count`, like the loss. The default can
        record "accuracy", the number of correct predictions.
        """
        from gptlite.models.plain import cross_entropy

        return cross_entropy(self, out, inputs)

    def keep(self, part: nn.Module, config: C, blocks: range) -> None:
        """Remove the other blocks of an nn.Sequential whose blocks each map a tensor to a tensor. Raises TypeError for
        any other module."""
        from gptlite.models.plain import keep_blocks

        keep_blocks(part, blocks)

    def activations(self, config: C, batch: int, length: int) -> tuple[int, ...] | None:
        """Return None: the blocks are run on the meta device to find the shapes."""
        return None

    @builds_model
    def tied(self, config: C) -> Mapping[str, str]:
        """Return the parameters that several modules share; pipelines are refused if there are any."""
        from gptlite.models.plain import shared_parameters

        return shared_parameters(self, config)

    def initial(self, config: C, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """Return the initial values of a parameter. Matrices and filters are normal with standard deviation 1 /
        sqrt(fan-in). Vectors and scalars are 1 if their name ends with `weight` (a norm's gain), otherwise 0."""
        if len(shape) > 1:
            return Normal(1 / math.sqrt(math.prod(shape[1:])))
        return Constant(1.0 if name.endswith("weight") else 0.0)

    def buffers(self, config: C, ops: Ops, seed: int) -> dict[str, Tensor]:
        """Build the model on the CPU and return its buffers."""
        import torch

        with torch.device("cpu"):
            return dict(self.build(config, ops, seed).named_buffers())

    # Capabilities: PlainModule and BatchNorms.

    def embeddings(self, config: C) -> tuple[str, ...]:
        """Return the names of the parameters of embedding modules."""
        from gptlite.models.plain import embeddings

        return embeddings(self, config)

    def input_shapes(self, config: C, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of each block's input for a micro-batch x."""
        from gptlite.models.plain import input_shapes

        return input_shapes(self, config, x)

    def check_pass(self, config: C, x: Any, targets: Tensor) -> None:
        """Raise ConfigError if a forward pass fails on the meta device."""
        from gptlite.models.plain import check_pass

        check_pass(self, config, x, targets)

    def count_flops(self, config: C, length: int, example: tuple[Any, Tensor] | None) -> int:
        """Return the FLOPs per token of a sequence, or those of an example, counted on the meta device."""
        from gptlite.models.flops import count_flops
        from gptlite.models.model import Model

        return count_flops(Model(self, config), length, example)

    def sync_batch_norms(self, part: nn.Module, mesh: Mesh) -> None:
        """Replace torch's batch norms in a part with SyncedBatchNorm, in place."""
        from gptlite.models.batch_norm import sync_batch_norms

        sync_batch_norms(part, mesh)

    def has_batch_norm(self, part: nn.Module) -> bool:
        """Return True if a part has a SyncedBatchNorm."""
        from gptlite.models.batch_norm import has_batch_norm

        return has_batch_norm(part)

    def tracking_once(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
        """Return a function that creates a `forward` which updates running statistics only in its first call."""
        from gptlite.models.batch_norm import tracking_once

        return tracking_once(block, forward)
