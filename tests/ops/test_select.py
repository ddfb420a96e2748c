"""Which path runs, and what is said about it."""

import pytest
import torch

from gptlite.errors import ConfigError
from gptlite.ops.config import Attention, Implementation, OpsConfig
from gptlite.ops.select import select_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("device", "taken"), [(CPU, Attention.matmul), (CUDA, Attention.sdpa)], ids=str)
def test_auto_picks_attention_by_device(device, taken):
    ops = select_ops(OpsConfig(), device)
    assert ops.attention is taken
    assert ops.reasons[0].startswith(f"attention {taken.value} (")


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
def test_what_is_asked_for_runs(choice, device):
    ops = select_ops(OpsConfig(attention=choice), device)
    assert ops.attention is choice
    assert "asked for" in ops.reasons[0]


def test_a_path_that_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="ops=fused"):
        select_ops(OpsConfig(Implementation.fused), CPU)
