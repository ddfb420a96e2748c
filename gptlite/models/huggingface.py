"""Interface of the conversion between a model and Hugging Face's transformers. No torch here."""

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
    """Return the tensor itself: the view of a tensor with the same layout in both formats."""
    return ours


@dataclass(frozen=True)
class Weight:
    """A parameter: its name and shape in transformers, and its name and shape in gptlite. With `ours` None it is zeros
    in transformers and absent in gptlite.

    `view` returns a view of our tensor whose elements, in row-major order, are those of the tensor in transformers: an
    export reads it, an import writes into it.
    """

    name: str
    shape: tuple[int, ...]
    ours: str | None
    our_shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor] = unchanged


@dataclass(frozen=True)
class Piece:
    """A tensor of transformers that is made of other files: its name and shape, its dtype, and a function that returns
    it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Adapter(Generic[C]):
    """Conversion of a model to and from a class of transformers. Required are `weights`, `to_json` and
    `from_json`.

    `model_type`: the key in config.json by which an import finds the model. `model_class`: the class with
    `from_pretrained`. `title`: the model's name in messages.
    """

    model_type: str
    model_class: str
    title: str

    def weights(self, config: C) -> Iterator[Weight]:
        """Yield every parameter of the transformers model, in the order of the file."""
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def differences(self, config: C) -> list[str]:
        """Return the configuration values, as `model.key=value`, that the transformers model cannot have."""
        return []

    def to_json(self, config: C, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        """Return the content of config.json. `eod` is the id of the end-of-document token."""
        raise NotImplementedError(f"{type(self).__name__} has no to_json")

    def from_json(self, content: Mapping[str, Any], name: str) -> C:
        """Return the configuration that a config.json describes, with its vocabulary size; `name` is used by models
        with a name. Raises ConfigError with the key for unsupported values."""
        raise NotImplementedError(f"{type(self).__name__} has no from_json")

    def from_meta(
        self, params: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]]
    ) -> tuple[dict[str, Any], list[Piece]] | None:
        """Return the content of config.json, and the tensors, of a model as Meta distributes it: its params.json, and
        the tensors of each consolidated.NN.pth. None if the model is not one of Meta's. Raises ConfigError with the key
        or tensor for another model."""
        return None

    def canonical(self, name: str) -> str | None:
        """Return the one name of a tensor that checkpoints store under several names; None if it is not a parameter,
        such as a mask."""
        return name

    def copies(self) -> Mapping[str, str]:
        """Return `{copy: parameter}`, in canonical names, for tensors that a checkpoint may store twice. They must be
        equal."""
        return {}
