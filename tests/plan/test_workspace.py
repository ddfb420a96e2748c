"""Memory that ops take beside their results on this CPU, whatever its instruction set, against real allocations."""

from itertools import accumulate

import pytest
import torch

from gptlite.satellites.plan import workspace
from gptlite.satellites.plan.workspace import tape_of
from gptlite.torch_private.allocations import recorded_allocations

CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
# [samples, channels, height], [filters, height of a filter], stride: a ResNet's first one and its blocks'.
SIZES = [((4, 3, 32), (16, 7), 2), ((2, 16, 16), (32, 3), 2), ((4, 24, 8), (24, 3), 1), ((4, 16, 16), (32, 1), 2)]


def conv(size: tuple, filters: tuple, stride: int, device: str, dtype: torch.dtype, backward: bool) -> tuple:
    """An op and its arguments."""
    samples, channels, height = size
    x = torch.zeros(samples, channels, height, height, device=device, dtype=dtype)
    weight = torch.zeros(filters[0], channels, filters[1], filters[1], device=device, dtype=dtype)
    options = [stride] * 2, [filters[1] // 2] * 2, [1, 1], False, [0, 0], 1
    arguments = (x, weight, None, *options)
    if not backward:
        return CONVOLUTION, arguments
    return BACKWARD, (CONVOLUTION(*arguments), x, weight, [0], *options, [True, True, False])


def taken(op, arguments: tuple) -> int:
    """What a real op allocates at its peak, with its results."""
    with torch.no_grad(), recorded_allocations() as allocations:
        _ = op(*arguments)
    return max(accumulate(size for _, _, size in allocations))


def planned(op, arguments: tuple, threads: int = 1) -> int:
    return max(accumulate(size for size, _ in tape_of(op, arguments, op(*arguments), threads)))


@pytest.fixture(autouse=True)
def forgotten() -> None:
    vars(workspace.tape_of)["cache_clear"]()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_convolution_takes_what_is_planned(dtype, backward):
    for size in SIZES:
        found = planned(*conv(*size, "meta", dtype, backward))
        assert found == taken(*conv(*size, "cpu", dtype, backward)) > 0


@pytest.mark.parametrize("limit", ["MOST_FLOPS", "MOST_BYTES"])
def test_a_large_convolution_is_measured_on_fewer_samples(limit, monkeypatch):
    size = (128, 16, 16), (32, 3), 1
    sizes = []
    run = workspace._run
    monkeypatch.setattr(workspace, "_run", lambda *args: sizes.append(args[-1]) or run(*args))
    for backward in (False, True):
        whole = planned(*conv(*size, "meta", torch.float32, backward))
        assert sizes == [128]
        vars(workspace.tape_of)["cache_clear"]()
        with monkeypatch.context() as lower:
            lower.setattr(workspace, limit, getattr(workspace, limit) / (8 if limit == "MOST_FLOPS" else 64))
            assert planned(*conv(*size, "meta", torch.float32, backward)) == pytest.approx(whole, rel=0.02)
        few, more = sizes[1:]
        assert (more, few < 64) == (2 * few, True)
        sizes.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_16_bits_take_what_is_planned(dtype):
    mm, bmm = torch.ops.aten.mm.default, torch.ops.aten.bmm.default
    for op, sizes in ((mm, ((96, 40), (40, 72))), (bmm, ((6, 48, 20), (6, 20, 24)))):
        found = planned(op, tuple(torch.zeros(size, dtype=dtype, device="meta") for size in sizes))
        assert found == taken(op, tuple(torch.zeros(size, dtype=dtype) for size in sizes))


def test_a_rank_is_measured_with_its_own_threads(monkeypatch):
    """Ranks share the cores, and each thread may sum filters' gradients in a buffer of its own."""
    counts = []
    run = workspace._run
    monkeypatch.setattr(workspace, "_run", lambda *args: counts.append(torch.get_num_threads()) or run(*args))
    for threads in (1, 2):
        planned(*conv(*SIZES[0], "meta", torch.float32, True), threads=threads)
    assert counts == [1, 2]
    assert torch.get_num_threads() == 1
