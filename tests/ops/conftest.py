"""What tests of ops share."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gptlite.ops.config import ON_GPU, PRODUCTS


@pytest.fixture
def mixed_products() -> Iterator[None]:
    """On a CPU torch's products of 16 bits into fp32, which only GPUs have."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: (a.double() @ b.double()).to(dtype), "CPU")
    library.impl("addmm.dtype_out", _add_product, "CPU")
    yield
    library._destroy()


def _add_product(onto: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor, **_: float) -> Tensor:
    assert onto.dtype == out.dtype == dtype
    return out.copy_(onto + a.double() @ b.double())


@pytest.fixture(params=["sliced", "aligned"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, mixed_products: None) -> str:
    """Products as a CPU takes them, and as a GPU does: of padded operands, into fp32."""
    if request.param == "aligned":
        monkeypatch.setitem(PRODUCTS, "cpu", ON_GPU)
    return request.param
