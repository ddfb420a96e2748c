"""Optional capabilities of a model. A spec has a capability if it defines its methods; it need not extend the class.

Callers ask for one with `capability`, or with `required` where they cannot do without it. Capabilities that only a
satellite asks for are beside the satellite's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from gptlite.errors import ConfigError

if TYPE_CHECKING:
    from gptlite.models.sampling import Sampling
    from gptlite.models.spec import Matrices, ModelSpec
    from gptlite.parallelism.stage_runner import StageRunner

K = TypeVar("K")


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


def capability(spec: ModelSpec, kind: type[K]) -> K | None:
    """Return the spec, as an object with this capability; None if it does not have it."""
    return cast(K, spec) if all(hasattr(spec, name) for name in _methods(kind)) else None


def required(spec: ModelSpec, kind: type[K], where: str) -> K:
    """Return the spec, as an object with this capability. Raises ConfigError, with a message that begins with `where`,
    if it does not have it."""
    if (found := capability(spec, kind)) is not None:
        return found
    words = re.sub("(?<!^)(?=[A-Z])", " ", kind.__name__).lower()
    methods = " and ".join(f"`{name}`" for name in _methods(kind))
    raise ConfigError(f"{where}: the {spec.name} model has no {words}; define {methods} in its spec")


def _methods(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]
