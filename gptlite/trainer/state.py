"""Everything a checkpoint holds."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gptlite.data.loader import Loader
from gptlite.model.gpt import GPT
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.state import optimizer_state


def model_tensors(parts: list[GPT]) -> dict[str, Tensor]:
    """The parameters by their global names; a tied embedding is one key."""
    return {f"model.{name}": p.detach() for part in parts for name, p in part.named_parameters()}


@dataclass
class TrainState:
    """The parts of the model on this rank, what trains them, and how far training is.

    Dropout and the data's order are functions of (seed, consumed_samples), so there is no RNG state.
    """

    parts: list[GPT]
    optimizer: Optimizer
    schedule: Schedule
    loader: Loader
    data_identity: dict[str, Any]  # what makes it the same data at resume
    step: int = 0  # optimizer steps done
    consumed_samples: int = 0
    tokens: int = 0
    best_val_loss: float = math.inf  # nats per token
    evaluated_step: int = 0  # the step of the last evaluation
    wandb_id: str | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, live: writing into one changes the state."""
        return model_tensors(self.parts) | optimizer_state(self.optimizer)

    def num_bytes(self) -> int:
        """Size of a checkpoint's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def meta(self) -> dict[str, Any]:
        """What is not a tensor, as JSON."""
        best = self.best_val_loss if math.isfinite(self.best_val_loss) else None
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "tokens": self.tokens,
            "best_val_loss": best,
            "evaluated_step": self.evaluated_step,
            "wandb_id": self.wandb_id,
            "data_identity": self.data_identity,
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Takes back what `meta` gave."""
        self.step, self.consumed_samples = meta["step"], meta["consumed_samples"]
        self.tokens, self.wandb_id = meta["tokens"], meta["wandb_id"]
        self.evaluated_step = meta["evaluated_step"]
        self.best_val_loss = math.inf if meta["best_val_loss"] is None else meta["best_val_loss"]
