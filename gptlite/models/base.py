"""Base class of all model specs: the interface between the engine and a model.

A spec gives the engine what it needs to train a model on any layout. Plug-ins extend gptlite.models.spec.ModelSpec,
which defines the abstract methods for a plain nn.Module. If a parallelism axis needs a method that is missing, the
configuration is refused before any rank starts. Importing a spec must not import torch, so that composing a
configuration stays fast.

Facts about a model's sizes and its description have their own base classes (gptlite.models.facts). Optional
capabilities, such as text generation, are defined in gptlite.models.capabilities.

Shapes: B sequences in a micro-batch, sequence length S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from gptlite.models.config import ModelConfig
from gptlite.models.facts import Description, Limits
from gptlite.ops.matrices import Matrices as Matrices

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.mesh import Mesh
    from gptlite.precision import Policy

C = TypeVar("C", bound=ModelConfig)
M = TypeVar("M", bound=Callable[..., Any])


class Cut(Enum):
    """Sharding of a layer of gptlite.models.layers over the tensor axis."""

    column = "column"  # each rank computes some outputs of a linear layer, or holds the gains of its heads
    row = "row"  # each rank takes some inputs of a linear layer, and the results are summed
    vocabulary = "vocabulary"  # each rank holds some rows of an embedding, or of the output head
    experts = "experts"  # each rank holds some hidden units of every expert, and the results are summed

    @property
    def dims(self) -> dict[str, int]:
        """`{parameter: sharded dim}` of such a layer. Other parameters are replicated."""
        if self is Cut.experts:
            return {"up": 1, "down": 2}
        return {"weight": 1} if self is Cut.row else {"weight": 0, "bias": 0}


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std), drawn from (seed, global name, global offset), the same on any layout."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same initial value for all elements."""

    value: float


def builds_model(method: M) -> M:
    """Mark a method of a spec that builds the model to find its result, so that checks of a configuration call it only
    if they have to."""
    method.builds_model = True  # type: ignore[attr-defined]
    return method


def is_built(method: Callable[..., Any]) -> bool:
    """Return True if a method of a spec is marked with `builds_model`."""
    return getattr(method, "builds_model", False)


class BaseSpec(Limits[C], Description[C], ABC):
    """Interface of a model for the engine. Methods take the model's configuration, an instance of `schema`.

    Presets refer to the schema by `name`: `defaults: [<name>_schema, _self_]`. `casts` is True if the model's layers
    compute in their input's dtype, whatever their parameters' dtype, like those of gptlite.models.layers. Other models
    run under autocast.
    """

    name: str
    schema: type[C]
    casts = False
    reads: str = "tokens"  # or "samples", for a dataset that is not text
    keyed_dropout = False  # True if dropout masks are keyed by sample, not drawn from torch's generator
    metrics: tuple[str, ...] = ()  # names of the sums that `forward` records, such as "accuracy"
    blocks_key = "blocks"  # the configuration key of the number of blocks
    positive: tuple[str, ...] = ()  # configuration keys that must be at least 1 if they are not null
    renamed: Mapping[str, str] = {}  # {former configuration key: key}, for saved configurations
    removed: Mapping[str, object] = {}  # {former configuration key: value that had no effect}, likewise

    # Methods that need only a configuration. They do not need torch, unless they are marked with `builds_model`.

    def check(self, config: C) -> None:
        """Raise ConfigError for a configuration that is invalid by itself."""

    @abstractmethod
    def num_blocks(self, config: C) -> int | None:
        """Return the number of blocks that can be divided into pipeline stages; if None, parallelism.pipeline > 1 is
        refused."""

    # Methods on modules.

    @abstractmethod
    def build(self, config: C, ops: Ops, seed: int) -> nn.Module:
        """Build the whole model on the default device, which is the meta device in a run. `seed` keys dropout."""

    @abstractmethod
    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """Return the blocks of a part by their index in the whole model, in forward order. Blocks are the units of
        ZeRO's all-gathers, pipeline stages and activation checkpointing."""

    @abstractmethod
    def forward(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the losses, fp32, in nats. x: tokens int64 [B, S], or the inputs of samples.

        In a pipeline, a part without the model's beginning gets activations as x, and a part without its end returns
        activations.
        """

    def count(self, targets: Tensor) -> Tensor | int:
        """Return the number of losses that `forward` sums for these targets, by default the number of targets other
        than -100.

        Override it to return `len(targets)` if a sample has one loss but a target of several elements.
        """
        from gptlite.ops.inputs import IGNORE

        return (targets != IGNORE).sum()

    @abstractmethod
    def keep(self, part: nn.Module, config: C, blocks: range) -> None:
        """Reduce the whole model to the part with these blocks: remove the other blocks, and the layers at either end
        of the model that are not in the part."""

    @abstractmethod
    def activations(self, config: C, batch: int, length: int) -> tuple[int, ...] | None:
        """Return the shape of the activations that one pipeline stage sends to the next, if it is the same between all
        blocks. If None, the blocks' inputs are found by `PlainModule.input_shapes`."""

    def cuts(self, config: C) -> Mapping[str, Cut]:
        """Return `{module name: sharding}` of the layers that are sharded over the tensor axis; `*` matches one
        component of a name."""
        return {}

    @abstractmethod
    def tied(self, config: C) -> Mapping[str, str]:
        """Return `{copy: owner}`, the names of tied parameters. In a pipeline, the first stage holds the owner and the
        last stage the copy."""

    @abstractmethod
    def initial(self, config: C, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """Return the initial values of a parameter."""

    @abstractmethod
    def buffers(self, config: C, ops: Ops, seed: int) -> dict[str, Tensor]:
        """Return `{name: initial value}` of the whole model's buffers."""

    def prepare(self, part: nn.Module, policy: Policy, recomputes: bool) -> None:
        """Set up a part for a precision policy, once. `recomputes`: blocks are recomputed in the backward pass."""

    def begin_step(self, config: C, parts: Sequence[nn.Module], upstream: Tensor) -> None:
        """Prepare parts for a step. `upstream`: the gradient with respect to the sum of losses, a scalar tensor."""

    def end_step(self, config: C, parts: Sequence[nn.Module], mesh: Mesh) -> Tensor | None:
        """Update state that depends on the whole step, after its last backward pass. Called on all ranks.

        Returns the loads of a mixture of experts, the same on all ranks; None for other models. The loads are fp64
        [layers with experts, E + 1]: the number of tokens of each expert and, in the last column, the router's losses
        summed over tokens.
        """
