"""What ranks import and set in a test, for the process that they are forked from. Nothing here may start a thread."""

import gc

import composition
import forked  # noqa: F401 - which programs import to start ranks, and may not have on their path
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pytest  # noqa: F401 - in the test files that have functions for ranks
import torch.distributed._tools
import torch.distributed.checkpoint
import torch.distributed.tensor.debug
import torch.testing._internal.composite_compliance  # noqa: F401

import gptlite.optimizer.torch_rules
import gptlite.satellites.parity.record
import gptlite.satellites.plan.advice
import gptlite.satellites.plan.banner
import gptlite.start.api
import gptlite.start.pretrain  # noqa: F401
from gptlite.config import compose

compose.compose = composition.compose
gc.set_threshold(50_000, 20, 50)
gc.freeze()  # no rank's collector need go through what is here
