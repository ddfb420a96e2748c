"""Reading and collation of samples, and their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from gptlite.data.batch_loader import Batch
from gptlite.errors import ConfigError, first_line, text_of
from gptlite.torch_private.ops import tree_leaves, tree_map

TARGETS = ("labels", "label", "targets", "target")  # keys of targets in a dict sample, in order of preference


class SampleBatch(Batch):
    """One micro-batch of samples: `tokens` is the model's input, a tensor, tuple or dict of tensors [B, ...]."""

    @property
    def length(self) -> int:
        return 1  # a sample counts as one position

    def each(self, change: Callable[[Tensor], Tensor]) -> SampleBatch:
        x, targets = tree_map(change, (self.tokens, self.targets))
        return SampleBatch(x, targets, change(self.sample_ids), counted=self.counted)


def split(key: str, batch: Any) -> tuple[Any, Tensor]:
    """Return the model's input and the targets of a collated batch.

    Raises ConfigError if the batch has no targets, or has values that are not tensors.
    """
    if isinstance(batch, Mapping):
        named = next((name for name in TARGETS if name in batch), None)
        if named is None:
            raise ConfigError(f"{key}: a sample has the keys {', '.join(batch)}, but none of {', '.join(TARGETS)}")
        x, targets = {name: value for name, value in batch.items() if name != named}, batch[named]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        *first, targets = batch
        x = first[0] if len(first) == 1 else tuple(first)
    else:
        raise ConfigError(f"{key}: a sample is {type(batch).__name__}; return (input, target) or a dict of tensors")
    for leaf in tree_leaves((x, targets)):
        if not isinstance(leaf, Tensor):
            raise ConfigError(f"{key}: a sample contains {type(leaf).__name__} {leaf!r:.40}; return tensors or numbers")
    return x, targets


def read_sample(key: str, dataset: Any, index: int) -> Any:
    """Return a sample of a dataset. Raises ConfigError, which begins with `key`, for whatever the dataset raises."""
    try:
        return dataset[index]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # a plugin's dataset may raise anything
        raise ConfigError(f"{key}: sample {index} raised {type(error).__name__}: {text_of(error)}") from error


def collated(dataset: Any, samples: list[Any], key: str) -> Any:
    """Return samples as a batch. Raises ConfigError, which begins with `key`, if that fails."""
    try:
        return getattr(dataset, "collate", default_collate)(samples)
    except Exception as error:
        raise ConfigError(f"{key}: samples cannot be collated ({type(error).__name__}: {first_line(error)}); "
                          "return samples of equal shapes, or define `collate` in the dataset") from error  # fmt: skip
