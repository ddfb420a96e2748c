"""What the banner says of the kernel that SDPA takes."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from gptlite.ops import backend
from gptlite.ops.backend import sdpa_words

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_cpus_kernel_is_named() -> None:
    assert sdpa_words(CPU, torch.bfloat16, 3, 32, 64) == "flash for bfloat16 heads of 64"


def test_a_backend_that_materializes_the_scores_is_named() -> None:
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert sdpa_words(CPU, torch.float32, 3, 32, 64) == "math for float32 heads of 64"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that takes cuDNN's, could take the efficient one, and refuses flash attention with two reasons."""

    def refused(parameters: Any, debug: bool) -> bool:
        warnings.warn("Flash wants sm80. (Triggered internally at sdp_utils.cpp:83.)", stacklevel=2)
        warnings.warn("head_dim should be smaller. (Triggered internally at sdp_utils.cpp:98.)", stacklevel=2)
        return False

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **options: SDPBackend.CUDNN_ATTENTION.value)
    monkeypatch.setitem(backend.CHECKS, "flash", refused)
    monkeypatch.setitem(backend.CHECKS, "efficient", lambda parameters, debug: True)


@pytest.mark.usefixtures("gpu")
def test_why_another_was_refused_is_told() -> None:
    assert sdpa_words(CUDA, torch.bfloat16, 3, 32, 512) == (
        "cuDNN for bfloat16 heads of 512; flash cannot: Flash wants sm80, head_dim should be smaller; efficient can run"
    )
