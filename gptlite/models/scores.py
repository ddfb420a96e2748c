"""Scores of targets, for lm-eval and the check of exports."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.models.capabilities import capability
from gptlite.models.model import Model
from gptlite.models.plain import call, has_end
from gptlite.models.spec import ModelSpec
from gptlite.ops.inputs import Inputs
from gptlite.ops.token_scores import token_scores


class TargetScores(Protocol):
    """Capability of a spec. Without it, scores are computed from the module's output, logits [B, S, V]."""

    def scores(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return the scores of the targets [B, S], fp32 [B, S, 2]: the log probability of each target, and 1 if no
        token is more likely, otherwise 0. Both are 0 where the target is -100. A part without the model's end returns
        activations."""
        ...


def scores(model: Model, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
    """Return the scores [B, S, 2] of the targets [B, S], or the activations of a part without the loss: see
    TargetScores. Raises ConfigError for a model whose output has no scores."""
    if model.autocast is None:
        return _scores(model.spec, part, x, inputs)
    with torch.autocast(inputs.targets.device.type, model.autocast):
        out = _scores(model.spec, part, x, inputs)
    return out if out.shape == (*inputs.targets.shape, 2) else out.to(model.dtype)  # activations, as in Model.forward


def _scores(spec: BaseSpec, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
    if (scorer := capability(spec, TargetScores)) is not None:
        return scorer.scores(part, x, inputs)
    problem, kind = f"the {spec.name} model returns no token logits, which lm-eval's tasks need", type(spec)
    if kind.forward is not ModelSpec.forward:
        raise ConfigError(f"{problem}: {kind.__name__} overrides `forward`; define its `scores` too")
    out = call(part, x)
    if not has_end(part):
        return out
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != inputs.targets.shape:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{problem}: its output is {found}; define `scores` in {kind.__name__}")
    return token_scores(logits, inputs.targets, lambda rows: rows)
