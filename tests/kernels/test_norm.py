"""The norm of many tensors, accurate at any number of elements."""

import torch

from kernels.backends import Backend
from kernels.cases import BEST, BF16, CPUS, DTYPES, FP16, FP32, WIDE, WIDTHS, each, generator, normal, of_dtypes, on
from kernels.loop import loop_over
from kernels.tolerances import ARITHMETIC, check


def check_norm(backend: Backend, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    total = sum((each.double().square().sum() for each in tensors), torch.zeros(()).double())
    check("norm", backend.norm(tensors, dtype), total.sqrt(), total.sqrt(), ARITHMETIC["norm"])


@each(
    "width,dtype", [(w, d) for w in (*WIDTHS, *WIDE) for d in DTYPES], [(w, d) for w in (1, 33, 5000) for d in DTYPES]
)
def test_one_tensor(backend: Backend, width, dtype) -> None:
    check_norm(backend, [normal([width], dtype, "x")], dtype)


@each("dtype", DTYPES, (FP32, BF16))
def test_many_tensors_of_all_sizes(backend: Backend, dtype) -> None:
    sizes = torch.randint(0, 200, (300,), generator=generator("sizes")).tolist()
    sizes[10] = sizes[20] = 0
    sizes[50] = 3000 if backend.is_emulated else 30_000
    check_norm(backend, [normal([size], dtype, i) for i, size in enumerate(sizes)], dtype)


@each("kind", ("one large", "tiny", "large", "zeros"), ("one large", "large"))
@of_dtypes()
def test_norms_of_extreme_values_match_the_reference(backend: Backend, kind, dtype) -> None:
    x = normal([3000], dtype, "x")
    match kind:
        case "one large":
            x[2999] = 6e4
        case "tiny":
            x = x * (1e-4 if dtype == FP16 else 1e-15)
        case "large":
            x = x * (1e4 if dtype == FP16 else 1e15)
        case "zeros":
            x.zero_()
    check_norm(backend, [x, x[:5]], dtype)


@on()
@loop_over("value", [float("nan"), float("inf"), -float("inf")])
@loop_over("place", [0, 1, 4999])
def test_what_is_not_finite_shows(backend: Backend, value, place) -> None:
    x = normal([5000], FP32, "x")
    x[place] = value
    norm = backend.norm([normal([7], FP32, "y"), x])
    assert norm.isnan() if value != value else norm == float("inf")


@on()
def test_the_norm_of_no_elements_is_zero(backend: Backend) -> None:
    assert backend.norm([]) == 0
    assert backend.norm([torch.empty(0), torch.empty(0)]) == 0


@each("dtype", (FP32, BF16), [BF16], backends=CPUS)
def test_forty_million_elements(backend: Backend, dtype) -> None:
    """Where a plain fp32 sum stops growing."""
    x = torch.empty(1_000_000).uniform_(0.5, 1.5, generator=generator("forty")).to(dtype)
    check_norm(backend, [x.repeat(41)[:40_000_001]], dtype)


@each("dtype", DTYPES, backends=[BEST])
def test_a_million_equal_elements(backend: Backend, dtype) -> None:
    """Whose roundings all go the same way."""
    x = torch.full((1_000_000,), 1.1).to(dtype)
    check_norm(backend, [x], dtype)
