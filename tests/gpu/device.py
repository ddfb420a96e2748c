"""Where the tests of this folder run: a GPU where there is one, else a CPU in its place, so that they cannot rot."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Marks of a test that a GPU runs with the others, and a CPU with the slow ones.
ON_A_CPU_SLOW = (pytest.mark.slow,) if DEVICE.type == "cpu" else ()
