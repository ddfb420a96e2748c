"""Optional capabilities of a model. A spec has a capability if it defines its methods; it need not extend the class.

Callers ask for one with `capability`, or with `required` where they cannot do without it. Capabilities that only a
satellite asks for are beside the satellite's code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from gptlite.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.models.base import BaseSpec, Matrices
    from gptlite.parallelism.mesh import Mesh
    from gptlite.parallelism.stage_runner import StageRunner

K = TypeVar("K")


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling the next token. Temperature 0 selects the most likely token; `top_k` 0 and `top_p` 1 turn
    these limits off."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0 (0: most likely token)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2**63")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


class TextGeneration(Protocol):
    """Generation of text, for samples, `gptlite generate` and tasks of lm-eval."""

    def generate(
        self,
        runner: StageRunner,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        stop: int | None,
        cache: bool,
    ) -> Iterator[int]:
        """Yield up to `max_tokens` tokens that continue `prompt`, ending before the first `stop`. `cache`: keep the
        keys and values of earlier tokens. All ranks call it."""
        ...


class MuonMatrices(Protocol):
    """Matrices in the parameters, for Muon. Without this capability, Muon updates every matrix separately, except those
    of torch's embedding modules."""

    def matrices(self, config: Any) -> Matrices:
        """Return the matrix structure of the parameters."""
        ...


class PlainModule(Protocol):
    """Properties that are found in the module itself. The specs of plug-ins have it, since ModelSpec defines it
    (gptlite.models.spec)."""

    def embeddings(self, config: Any) -> tuple[str, ...]:
        """Return the names of the parameters of embedding modules, which Muon leaves to AdamW."""
        ...

    def input_shapes(self, config: Any, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of each block's input for a micro-batch x, whose values are not read."""
        ...

    def check_pass(self, config: Any, x: Any, targets: Tensor) -> None:
        """Raise ConfigError if a forward pass on inputs of these shapes fails, its loss is not a scalar tensor, or the
        loss does not record the metrics that the spec declares."""
        ...

    def count_flops(self, config: Any, length: int, example: tuple[Any, Tensor] | None) -> int:
        """Return the FLOPs per token of a forward and backward pass on a sequence of `length`, or those of an example.
        Raises Uncounted if they cannot be counted."""
        ...


class BatchNorms(Protocol):
    """Batch norms, whose statistics are over all data ranks. ModelSpec of plug-ins defines it."""

    def sync_batch_norms(self, part: nn.Module, mesh: Mesh) -> None:
        """Let the batch norms of a part average over the micro-batches of all data ranks."""
        ...

    def has_batch_norm(self, part: nn.Module) -> bool:
        """Return True if a part has a batch norm. The loss then depends on how many samples the micro-batches of all
        data ranks have together."""
        ...

    def tracking_once(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
        """Return a function that creates a separate `forward` for each forward pass. The first call of that `forward`
        updates running statistics; the second call, which recomputes the block, does not."""
        ...


class Uncounted(ValueError):
    """Raised for a model whose FLOPs cannot be counted, with the reason and the fix."""


def capability(spec: BaseSpec, kind: type[K]) -> K | None:
    """Return the spec, as an object with this capability; None if it does not have it."""
    return cast(K, spec) if all(hasattr(spec, name) for name in _methods(kind)) else None


def required(spec: BaseSpec, kind: type[K], where: str) -> K:
    """Return the spec, as an object with this capability. Raises ConfigError, with a message that begins with `where`,
    if it does not have it."""
    if (found := capability(spec, kind)) is not None:
        return found
    words = re.sub("(?<!^)(?=[A-Z])", " ", kind.__name__).lower()
    methods = " and ".join(f"`{name}`" for name in _methods(kind))
    raise ConfigError(f"{where}: the {spec.name} model has no {words}; define {methods} in its spec")


def _methods(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]
