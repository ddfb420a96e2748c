"""What a model says of its form in Hugging Face's transformers, for export and import. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gptlite.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

C = TypeVar("C", bound=ModelConfig)


def unchanged(ours: Tensor) -> Tensor:
    """Of a tensor that is the same there."""
    return ours


@dataclass(frozen=True)
class Weight:
    """A parameter: its name and shape there, its name and shape here; `ours` None: zeros there and nothing here.

    `view` of our tensor is a view of it whose elements, row by row, are those of the tensor there: reading it exports,
    writing into it imports.
    """

    name: str
    shape: tuple[int, ...]
    ours: str | None
    our_shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor] = unchanged


class Adapter(Generic[C]):
    """A model as a class of transformers stores it. All but `canonical` and `copies` is required.

    `model_type`: of config.json, by which an import finds the model. `model_class`: what `from_pretrained` is called
    on. `title`: the model's name in messages.
    """

    model_type: str
    model_class: str
    title: str

    def weights(self, config: C) -> Iterator[Weight]:
        """Every parameter that there is there, in the order of the file."""
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def to_json(self, config: C, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        """The content of config.json. `eod` is the id that ends a document."""
        raise NotImplementedError(f"{type(self).__name__} has no to_json")

    def from_json(self, content: Mapping[str, Any], name: str) -> C:
        """The configuration that a config.json describes, with the size of its vocabulary; `name` for one that has a
        name. Raises ConfigError, naming the key, for what the model cannot do."""
        raise NotImplementedError(f"{type(self).__name__} has no from_json")

    def canonical(self, name: str) -> str | None:
        """The one name of a tensor that folders store under several; None for what is no parameter, a mask say."""
        return name

    def copies(self) -> Mapping[str, str]:
        """Tensors that a folder may hold twice, by canonical names: the copy, to the parameter that it must equal."""
        return {}
