"""A tied embedding that takes the head's gradient: the same as autograd's two, added up."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.ops.config import CrossEntropy
from gptlite.ops.embedding import TableGradient
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.parallelism.pipeline import MicroBatches, OnePart, known_upstream

SHAPE = GPTConfig(vocab_size=61, d_model=32, num_heads=2, num_layers=2, sequence_length=16)
OPS = Ops(cross_entropy=CrossEntropy.fused)


pytestmark = pytest.mark.usefixtures("kernels")


def model_of(table: bool, dtype: torch.dtype, tied: bool = True) -> GPT:
    model = GPT(replace(SHAPE, tied_embeddings=tied), replace(OPS, table=table))
    init_weights(Model.of(model.config), model, seed=0)
    model.compute_dtype = dtype
    return model


def gradients(model: GPT, upstream: float | None = None, passes: int = 2) -> dict[str, Tensor]:
    for seed in range(passes):
        tokens, targets = torch.randint(61, (2, 3, 16), generator=torch.Generator().manual_seed(seed))
        (model(tokens, targets, upstream=upstream) / 37).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("upstream", [None, known_upstream(torch.tensor(37)), 0.5])
def test_all_gradients_are_autograds(dtype: torch.dtype, tied: bool, upstream: float | None) -> None:
    ours, theirs = (gradients(model_of(table, dtype, tied), upstream) for table in (True, False))
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


def test_the_shared_gradient_is_used_only_if_the_table_is_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[TableGradient] = []
    take = TableGradient.take
    monkeypatch.setattr(TableGradient, "take", lambda self: taken.append(self) or take(self))
    for table, tied, count in ((True, True, 2), (True, False, 0), (False, True, 0)):
        taken.clear()
        gradients(model_of(table, torch.float32, tied))
        assert len(taken) == count
    assert all(each.take() is None for each in taken)
    model = model_of(True, torch.float32).to(torch.bfloat16)
    gradients(model)
    assert not taken, "what is to be added up in fp32 would be rounded"


def test_without_a_loss_the_table_has_its_usual_gradient() -> None:
    """Of the last layer's output, say."""
    results = []
    for shared in (TableGradient(), None):
        model = model_of(True, torch.float32)
        model.hidden(torch.arange(6).view(2, 3), None, shared=shared).square().sum().backward()
        assert model.token_embedding is not None
        results.append(model.token_embedding.weight.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_backward_pass_is_refused(dtype: torch.dtype) -> None:
    model = model_of(True, dtype)
    loss = model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_the_known_upstream_gradient_is_autograds(dtype: torch.dtype) -> None:
    """To the bit, or every step would take a pass over the table for nothing."""
    for count in (1, 3, 37, 768, 12_345, 2**24 + 1, 1_000_003):
        valid = torch.tensor(count, dtype=dtype)
        loss = torch.ones((), requires_grad=True)
        (loss / valid).backward()
        assert loss.grad is not None
        assert loss.grad / known_upstream(valid) == 1


def test_a_pass_tells_the_model_its_upstream_gradient() -> None:
    told: list[float | None] = []

    def forward(part: torch.nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        told.append(inputs.upstream)
        return next(part.parameters()).sum()

    valid, batch = torch.tensor(37), [torch.zeros(1, 4, dtype=torch.int64)] * 2
    OnePart(forward, torch.nn.Linear(2, 2), zero=0).run(MicroBatches(batch, batch, batch), valid)
    assert told == [known_upstream(valid)] * 2
