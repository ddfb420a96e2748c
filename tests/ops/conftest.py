"""What tests of ops share."""

import pytest

from gptlite.kernels.library import Loaded, load


@pytest.fixture(scope="session")
def kernels() -> None:
    """torch.ops.gptlite, on a CPU."""
    assert isinstance(load("cpu"), Loaded)
