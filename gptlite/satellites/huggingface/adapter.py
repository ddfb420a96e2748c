"""Interface for converting models to and from Hugging Face's transformers. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gptlite.models.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

C = TypeVar("C", bound=ModelConfig)


def unchanged(ours: Tensor) -> Tensor:
    """Return the tensor itself: the `view` of a Weight with the same layout in both formats."""
    return ours


@dataclass(frozen=True)
class Weight:
    """A parameter's name and shape in transformers, and its name and shape in gptlite.

    If `ours` is None, the parameter is zero in transformers and does not exist in gptlite. `view` returns a view of
    gptlite's tensor whose elements, in row-major order, are those of the tensor in transformers. An export reads from
    the view, and an import writes into it.
    """

    name: str
    shape: tuple[int, ...]
    ours: str | None
    our_shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor] = unchanged


@dataclass(frozen=True)
class ConvertedTensor:
    """A transformers tensor that is made from files in another format: its name, shape and dtype, and a function that
    returns it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Adapter(Generic[C]):
    """Conversion of a model to and from a transformers class. `weights`, `to_json` and `from_json` are required.

    `model_type`: the value of that key in config.json, by which an import finds the adapter. `model_class`: name of the
    transformers class with `from_pretrained`. `title`: the model's name in messages.
    """

    model_type: str
    model_class: str
    title: str

    def weights(self, config: C) -> Iterator[Weight]:
        """Yield every parameter of the transformers model, in the order of an exported file."""
        raise NotImplementedError(f"{type(self).__name__} does not define `weights`")

    def related(self, config: C) -> bool:
        """Return True if the transformers class has the same kinds of layers. Errors name the differences from such a
        class."""
        return True

    def differences(self, config: C) -> list[str]:
        """Return the configuration values, as `model.key=value`, that the transformers class does not support."""
        return []

    def to_json(self, config: C, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        """Return the content of config.json. `eod` is the id of the end-of-document token."""
        raise NotImplementedError(f"{type(self).__name__} does not define `to_json`")

    def from_json(self, content: Mapping[str, Any], name: str) -> C:
        """Return the configuration that a config.json describes, including the vocabulary size. `name`: the value of
        the key `name`, if the configuration has one. Raises ConfigError, naming the key, for unsupported values."""
        raise NotImplementedError(f"{type(self).__name__} does not define `from_json`")

    def from_meta(
        self, params: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]]
    ) -> tuple[dict[str, Any], list[ConvertedTensor]] | None:
        """Convert a model in Meta's format: its params.json, and the tensors of each consolidated.NN.pth. Return the
        content of config.json and the tensors; None if this model has no Meta format. Raises ConfigError, naming the
        key or tensor, if the files are of an unsupported model."""
        return None

    def canonical(self, name: str) -> str | None:
        """Return the canonical name of a tensor, which different checkpoints may store under different names; None if
        the tensor is not a parameter but, for example, a mask."""
        return name

    def copies(self) -> Mapping[str, str]:
        """Return `{copy: parameter}`, in canonical names, for tensors that a checkpoint may store twice. Both must be
        equal."""
        return {}
