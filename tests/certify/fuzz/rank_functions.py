"""What ranks do in the tests of the fuzz: the comparison with a bug in it, and functions that fail in other ways."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed.cells.bugs import planted

from gptlite.config import Config
from gptlite.errors import ConfigError
from gptlite.parallelism.boxes import local_tensor
from gptlite.satellites.certify.fuzz.run import compare_layout, save_first_step
from gptlite.trainer.state import TrainState


def with_bug(name: str, config: Config, reference: str) -> Any:
    """compare_layout, with a bug of bugs.py in every rank."""
    with planted(name):
        return compare_layout(config, reference)


def crashes(config: Config, reference: str) -> None:
    """The last rank fails; the others, which wait for it, hear that its connection is closed."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ZeroDivisionError("of the last rank")
    dist.all_reduce(torch.ones(1))


def refuses(config: Config, reference: str) -> None:
    raise ConfigError("parallelism.tensor=2 is refused; use parallelism.tensor=1")


def hangs(config: Config, reference: str) -> None:
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def ends(config: Config, reference: str) -> None:
    os._exit(3)


def saves_other_weights(config: Config) -> str:
    """save_first_step, of weights that are a tenth larger than those of the step."""
    tensors = TrainState.tensors

    def larger(state: TrainState) -> Any:
        with torch.no_grad():
            for _, parameter in state.named_parameters():
                local_tensor(parameter).mul_(1.1)
        return tensors(state)

    with patch.object(TrainState, "tensors", larger):
        return save_first_step(config)
