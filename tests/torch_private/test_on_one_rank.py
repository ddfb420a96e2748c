"""What torch's private names are used for, on one rank. tests/test_torch_private.py looks for the names themselves."""

import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.process_group import join_alone
from gptlite.parallelism.zero import before_backward
from gptlite.torch_private.distributed import set_timeout
from gptlite.torch_private.fsdp import (
    accumulate_gradients_now,
    keep_fp32_gradients,
    reduce_gradients_now,
    split_backward,
)
from gptlite.torch_private.simulation import stage_backward_input, stage_backward_weight


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one rank, so that FSDP2 gathers and reduces without other processes."""
    join_alone(60)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Block(nn.Module):
    """A product and a residual sum. FSDP2's hook is at the sum, and a weight-gradient pass begins at the product."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.product = nn.Linear(5, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(x)


def sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, gathered: torch.dtype | None = None) -> Block:
    """A block, with weights between -1 and 1, whose gradients are reduced in fp32."""
    module = Block(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(gathered, torch.float32), reshard_after_forward=False)
    return module


def gradient(module: Block) -> Tensor:
    """Of the weight, this rank's shard: what is not reduced stays with the gathered parameter."""
    assert isinstance(module, FSDPModule)
    module.reshard()
    assert module.product.weight.grad is not None
    return local_tensor(module.product.weight.grad)


def test_reduced_gradients_of_bf16_parameters_are_kept_in_fp32(mesh: DeviceMesh) -> None:
    """Their sum over micro-batches is no bf16 number."""
    module = sharded(mesh, torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32  # as models.parallelize.materialize does
    keep_fp32_gradients(module)
    for step in range(3):
        before_backward(module, 2, last=step == 2)
        module(torch.full((2, 5), 1 + step / 128, dtype=torch.bfloat16)).sum().backward()
    expected = torch.full((5, 5), sum(2 * (1 + step / 128) for step in range(3)))
    assert not torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(gradient(module), expected)


@pytest.mark.parametrize("order", ["IWIW", "IIWW"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("gathered", [None, torch.bfloat16])
def test_weight_gradient_passes_are_reduced(
    mesh: DeviceMesh, zero: int, gathered: torch.dtype | None, order: str
) -> None:
    """Whatever passes lie between them, and accumulated in fp32. Twice, as steps follow each other."""
    module = sharded(mesh, gathered=gathered)
    assert isinstance(module, FSDPModule)
    split_backward(module)
    for _ in range(2):
        module.zero_grad()
        inputs = [torch.full((2, 5), 1 + number / 64).requires_grad_() for number in range(2)]
        waiting, done = list(enumerate(inputs)), 0
        halves: list[list[dict[str, object]]] = []
        outputs = [module(x if gathered is None else x.to(gathered)) for x in inputs]
        for half in order:
            module.unshard()
            before_backward(module, 0, last=False)
            if half == "I":
                number, x = waiting.pop(0)
                halves.append(stage_backward_input([outputs[number].sum()], None, [x], module.parameters())[1])
                continue
            stage_backward_weight(module.parameters(), halves.pop(0))
            accumulate_gradients_now(module)
            done += 1
            if zero >= 2 or done == 2:
                before_backward(module, zero, last=done == 2)
                reduce_gradients_now(module)
        expected = torch.full((5, 5), sum(2 * (1 + number / 64) for number in range(2)))
        assert gradient(module).dtype == torch.float32
        assert torch.equal(gradient(module), expected)


def test_a_time_limit_is_set_without_a_warning(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_timeout(group, 123)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=123)
