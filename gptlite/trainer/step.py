"""One optimizer step: forward and backward over the micro-batches, clip, update."""

import math
from dataclasses import dataclass

import torch

from gptlite.data.loader import IGNORE
from gptlite.optimizer.clip import clip_grad_norm
from gptlite.optimizer.schedule import set_lr
from gptlite.trainer.state import TrainState


class Diverged(RuntimeError):
    """The loss or the gradient is not finite. The parameters are those of the step before."""


@dataclass(frozen=True)
class StepResult:
    """Mean loss in nats per token, gradient norm before clipping, and the rate the step was taken at."""

    loss: float
    grad_norm: float
    lr: float


def train_step(state: TrainState, accumulation: int, peak_lr: float, clip_norm: float) -> StepResult:
    """Takes the optimizer step `state.step` and advances the state. Raises Diverged before the parameters change.

    The loss is a sum over tokens divided once by the number of valid tokens of the global batch, so it does not
    depend on how the batch is cut into micro-batches.
    """
    (part,) = state.parts
    batches = [state.loader.batch(state.consumed_samples, index) for index in range(accumulation)]
    valid = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
    total = torch.zeros((), device=valid.device)
    for batch in batches:
        loss = part(batch.tokens, batch.targets, batch.sample_ids) / valid
        loss.backward()
        total += loss.detach()
    norm = clip_grad_norm(part.parameters(), clip_norm)
    loss_value, norm_value = torch.stack([total, norm]).tolist()  # the step's one wait for the device
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise Diverged(f"step {state.step + 1}: loss {loss_value}, gradient norm {norm_value}")
    lr = peak_lr * state.schedule.factor(state.step)
    set_lr(state.optimizer, lr)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.consumed_samples += sum(len(batch.tokens) for batch in batches)
    state.tokens += sum(batch.tokens.numel() for batch in batches)
    return StepResult(loss_value, norm_value, lr)
