"""What ranks do in test_steps_ranks.py."""

from __future__ import annotations

import hashlib
import signal
from contextlib import closing
from functools import partial
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from gptlite.config import Config, load
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.zero import local_tensor
from gptlite.parity.record import build
from gptlite.pretrain import pretrain
from gptlite.trainer.loop import train
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.step import StepResult
from gptlite.trainer.steps import Steps


def taken(config: Config, count: int, lag: int) -> tuple[list[StepResult], str]:
    """The results of the first steps, and a hash of this rank's parameters after them."""
    mesh = build_mesh(config.parallelism)
    try:
        state, step = build(config, mesh)
        steps, results = Steps(step, lag), []
        with closing(state.loader):
            for number in range(count):
                steps.begin(state)
                while steps.ready(everything=number == count - 1):
                    results.append(steps.take())
        digest = hashlib.sha256()
        for parameter in state.weights():
            digest.update(local_tensor(parameter).detach().contiguous().numpy().tobytes())
        return results, digest.hexdigest()
    finally:
        mesh.close()


def stopped(overrides: list[str], lag: int, rank: int, at: int) -> tuple[int, int]:
    """Exit code and steps of a run in whose step `at` a signal reaches one rank."""
    stop, asked, words = StopSignal(), 0, Stopping.words

    def counted(self: Stopping) -> Tensor:
        nonlocal asked
        asked += 1
        if asked == at and dist.get_rank() == rank:
            stop.received = signal.SIGTERM
        return words(self)

    with patch.object(Stopping, "words", counted), patch("gptlite.pretrain.train", partial(train, lag=lag)):
        return pretrain(load(overrides), stop_signal=stop), asked
