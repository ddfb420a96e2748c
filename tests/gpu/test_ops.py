"""The ops as torch sees them on the device: schemas, fakes, and the same bits twice."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from kernels.test_build_ops import arguments
from torch import Tensor
from torch.library import opcheck

from gptlite.kernels.case import Case
from gptlite.kernels.cases import CASES
from gptlite.kernels.check import TOLERANCES, measure
from gptlite.kernels.fakes import FAKES
from gptlite.kernels.info import CPU_ONLY
from gptlite.kernels.library import LoadedLibrary, load
from gpu.device import DEVICE, ON_A_CPU_SLOW
from kernels.cases import same_bits

OPS = [name for name in FAKES if DEVICE.type == "cpu" or not name.startswith(CPU_ONLY)]
HERE = [case for case in CASES if DEVICE.type == "cpu" or not case.cpu_only]
REPEATS = 3
DTYPES = [pytest.param(torch.float32, marks=ON_A_CPU_SLOW), torch.bfloat16]  # of which statistics are of another dtype


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    loaded = load(DEVICE.type)
    assert isinstance(loaded, LoadedLibrary), loaded.reason


def there(value: Any) -> Any:
    """On the device, where it is a tensor or a list of them."""
    if isinstance(value, list):
        return [there(each) for each in value]
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def test_every_op_has_a_fake() -> None:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("gptlite::")}  # fmt: skip
    assert names == set(FAKES)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Schema, autograd registration, and fakes of static and of dynamic shapes."""
    opcheck(getattr(torch.ops.gptlite, name).default, tuple(map(there, arguments(name, dtype))))


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.ops[0])
def test_the_self_check_passes(case: Case) -> None:
    errors = measure(case, DEVICE)
    assert {error.dtype for error in errors} == set(TOLERANCES)
    assert [error for error in errors if not error.fine] == []


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.ops[0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_twice(case: Case, dtype: torch.dtype) -> None:
    """Of many blocks, on a GPU; a sum in an order of chance, or a race, would show."""
    torch.manual_seed(0)
    size, *_ = case.gpu_sizes if DEVICE.type == "cuda" else case.sizes
    inputs = case.make(*size, dtype, DEVICE)
    first, *others = (case.ours(deepcopy(inputs)) for _ in range(REPEATS))
    for other in others:
        for a, b in zip(sum(first, ()), sum(other, ()), strict=True):
            assert same_bits(a, b)
