"""Default implementations of ModelSpec's methods for a plain nn.Module: blocks, pipeline parts, forward call and
loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.errors import ConfigError, one_line, text_of
from gptlite.models.metrics import check_metrics
from gptlite.models.model import Model
from gptlite.ops.inputs import IGNORE, Inputs
from gptlite.ops.select import Ops
from gptlite.torch_private.ops import tree_leaves, tree_map

# Number of blocks by `build` method and configuration. Global on purpose: a search over layouts needs it for the same
# model thousands of times.
_COUNTS: dict[tuple[Callable[..., nn.Module], str], int | None] = {}


class Dropped(nn.Identity):
    """Placeholder for a block of an nn.Sequential that another pipeline stage holds."""


def blocks_of(part: nn.Module) -> dict[int, nn.Module]:
    """Return the children of an nn.Sequential, or the elements of all outermost nn.ModuleLists, by index."""
    if isinstance(part, nn.Sequential):
        return {number: block for number, block in enumerate(part) if not isinstance(block, Dropped)}
    lists: list[nn.ModuleList] = []
    _find_lists(part, lists)
    return dict(enumerate(block for each in lists for block in each))


def _find_lists(module: nn.Module, lists: list[nn.ModuleList]) -> None:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            lists.append(child)
        else:
            _find_lists(child, lists)


def count_blocks(spec: Any, config: Any) -> int | None:
    """Return the number of children of a model that is an nn.Sequential; None for any other module."""
    key = type(spec).build, repr(config)
    if key not in _COUNTS:
        module = _whole(spec, config)
        _COUNTS[key] = len(module) if isinstance(module, nn.Sequential) else None
    return _COUNTS[key]


def embeddings(spec: Any, config: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a model's embedding modules. A tied parameter has its first name."""
    whole = _whole(spec, config)
    modules = (each for each in whole.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag))
    held = {id(each.weight) for each in modules}
    return tuple(name for name, parameter in whole.named_parameters() if id(parameter) in held)


def shared_parameters(spec: Any, config: Any) -> dict[str, str]:
    """Return `{other name: first name}` of the parameters that several modules of a model share."""
    named = _whole(spec, config).named_parameters(remove_duplicate=False)
    first: dict[nn.Parameter, str] = {}
    return {name: first[each] for name, each in named if first.setdefault(each, name) != name}


def _whole(spec: Any, config: Any) -> nn.Module:
    return Model(spec, spec.with_vocabulary(config, 1)).build(Ops(), 0)


def keep_blocks(part: nn.Module, blocks: range) -> None:
    """Keep these blocks of an nn.Sequential. Replace the others with placeholders, so that parameter names do not
    change."""
    if not isinstance(part, nn.Sequential):
        raise TypeError(f"{type(part).__name__} is not an nn.Sequential: define `keep` in the spec")
    for number in set(range(len(part))) - set(blocks):
        part[number] = Dropped()


@torch.no_grad()
def input_shapes(spec: Any, config: Any, x: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of each block's input, for a micro-batch with the shape and dtype of x. The values of x are not
    read."""
    with torch.device("meta"):
        out, shapes = torch.empty(x.shape, dtype=x.dtype), []
        for block in Model(spec, config).build(Ops(), 0).eval().children():  # batch norm cannot train on one value
            shapes.append(tuple(out.shape))
            out = block(out)
    return shapes


def check_pass(spec: Any, config: Any, x: Any, targets: Tensor) -> None:
    """Raise ConfigError if a forward pass on inputs of these shapes fails, its loss is not a scalar tensor, or the loss
    does not record the metrics that the spec declares.

    The pass runs on the meta device, without computing values. A model that needs values, or whose spec sets `casts`,
    is not checked.
    """
    if spec.casts:
        return
    metrics: dict[str, Any] = {}
    key = f"the {spec.name} model, given {_shapes(x)} and targets {_shapes(targets)}"
    try:
        with torch.device("meta"):
            x, targets = tree_map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), (x, targets))
            loss = spec.forward(Model(spec, config).build(Ops(), 0).eval(), x, Inputs(targets, metrics=metrics))
    except NotImplementedError as error:
        if type(spec).__name__ in text_of(error):  # a method that the spec does not define
            raise ConfigError(text_of(error)) from error
        return
    except ConfigError:
        raise
    except Exception as error:  # a model may raise anything
        if "meta" in text_of(error):
            return
        double = any(leaf.dtype == torch.float64 for leaf in tree_leaves(x))
        hint = "; return float32 samples" if double else ""
        raise ConfigError(f"{key}: {one_line(error)}{hint}") from error
    if not isinstance(loss, Tensor) or loss.dim():
        words = _shapes(loss) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{key}: the loss is {words}; return a scalar tensor, the sum over the samples")
    check_metrics(spec, metrics)


def _shapes(x: Any) -> str:
    """Format the shapes of inputs, e.g. `float32 [8, 3, 32, 32]`."""
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in tree_leaves(x))


def has_end(part: nn.Module) -> bool:
    """Return True if a part includes the model's last block, so that its output goes to the loss."""
    return not (isinstance(part, nn.Sequential) and len(part) and isinstance(part[-1], Dropped))


def call(part: nn.Module, x: Any) -> Any:
    """Call a module with a micro-batch's inputs: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(x, Mapping):
        return part(**x)
    return part(*x) if isinstance(x, tuple | list) else part(x)


def cross_entropy(spec: Any, out: Any, inputs: Inputs) -> Tensor:
    """Return the summed cross entropy of logits [B, ..., classes]. If the spec declares the metric "accuracy", record
    the number of correct predictions.

    `out` may also be an object with an attribute `logits`, as Hugging Face models return. Raises TypeError for other
    outputs and for targets that are not class indices.
    """
    logits, targets = getattr(out, "logits", out), inputs.targets
    if not isinstance(logits, Tensor) or targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(
            f"{type(spec).__name__}.loss: cross entropy needs logits [..., classes] and int64 targets [...], "
            f"not output {found} and targets {targets.dtype} {tuple(targets.shape)}; "
            "use class indices as targets, or define `loss` in the spec"
        )
    logits, targets = logits.flatten(0, -2).float(), targets.flatten()
    if "accuracy" in spec.metrics:
        inputs.metrics["accuracy"] = (logits.argmax(-1) == targets).sum()
    try:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    except IndexError as error:  # on a CPU; on a GPU, the kernel fails with a device-side assertion
        classes = logits.shape[-1]
        raise ConfigError(
            f"the {spec.name} model has {classes} classes, with indices from 0, but the data has another index: {error}"
        ) from error
