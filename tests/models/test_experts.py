"""Mixture of experts in one process: products, a layer by hand, the router's losses and bias, counts, refusals."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.conftest import planned
from models.weights import matmul_parameters
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gptlite.config import load
from gptlite.config.checks import check_layout
from gptlite.errors import ConfigError
from gptlite.models.experts import Experts, Router, balance, begin
from gptlite.models.gpt.config import GPTConfig, MLPKind, MoEConfig, Score
from gptlite.models.gpt.model import GPT
from gptlite.models.gpt.moe import MoE
from gptlite.models.gpt.spec import GPTSpec
from gptlite.ops.experts import Dispatch, grouped_linear
from gptlite.ops.select import Ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import MuonConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy, Precision
from gptlite.satellites.plan.parameters import num_parameters
from gptlite.trainer.totals import Loads

ONE = Mesh(torch.device("cpu"))


def config(**moe: Any) -> GPTConfig:
    keys = {"experts": 8, "top_k": 2, "d_ff": 16} | moe
    return GPTConfig(
        num_layers=2, num_heads=2, d_model=16, vocab_size=32, sequence_length=12, bias=False, moe=MoEConfig(**keys)
    )


def layer(**moe: Any) -> MoE:
    torch.manual_seed(0)
    found = MoE(config(**moe), Ops())
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found


def by_hand(moe: MoE, x: Tensor, keys: MoEConfig) -> Tensor:
    """Every token by itself, from the formula; GPT-2's GELU."""
    logits = x @ moe.router.weight.t()
    scores = logits.sigmoid() if keys.score is Score.sigmoid else logits.softmax(-1)
    out = torch.zeros_like(x)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:2])).unbind():
        token = tuple(place.tolist())
        weights, chosen = (scores[token] + moe.router.bias).topk(keys.top_k)
        weights = scores[token][chosen]
        weights = weights / weights.sum() if keys.renormalize else weights
        for weight, expert in zip(weights, chosen, strict=True):
            hidden = F.gelu(moe.experts.up[expert] @ x[token], approximate="tanh")
            out[token] += weight * (moe.experts.down[expert] @ hidden)
    return out if moe.shared is None else out + moe.shared(x)


@pytest.mark.parametrize(
    "keys",
    [{}, {"score": Score.sigmoid}, {"renormalize": False, "top_k": 3}, {"shared": 2}, {"top_k": 1}, {"top_k": 8}],
    ids=str,
)
def test_a_layer_is_its_formula(keys):
    moe, x = layer(**keys), torch.randn(2, 5, 16)
    moe.router.bias.copy_(torch.linspace(-0.3, 0.3, 8))
    torch.testing.assert_close(moe(x), by_hand(moe, x, config(**keys).moe), rtol=1e-5, atol=1e-5)


HALVES = [torch.bfloat16, torch.float16]
SIZES = {"aligned": (16, 24), "unaligned": (6, 10), "fp8": (32, 48)}
GROUPED = [*product(["aligned", "unaligned"], [torch.float32, *HALVES]), *product(["fp8"], HALVES)]


@pytest.mark.parametrize(("kind", "dtype"), GROUPED)
def test_grouped_products_and_their_gradients_are_those_of_a_loop(kind, dtype):
    """One expert has no rows; the rows of no other are a multiple of 16."""
    chosen = torch.tensor([0] * 5 + [1] + [3] * 17)[torch.randperm(23)].unsqueeze(1)
    ends, (inputs, outputs) = Dispatch.of(chosen, 4).ends, SIZES[kind]
    assert ends.tolist() == [5, 6, 6, 23]
    x, weight = torch.randn(23, inputs).to(dtype), torch.randn(4, outputs, inputs).to(dtype)
    found = []
    for fused in (True, False):
        ours = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = grouped_linear(*ours, ends, fused, fp8=kind == "fp8")
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype))
        found.append([out, *(each.grad for each in ours)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not found[0][2][2].any()
    assert torch.equal(found[0][0], grouped_linear(x, weight, ends)) == (kind != "fp8")


def test_no_rows_at_all_give_zero_gradients_not_none():
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
    out = grouped_linear(x, weight, torch.zeros(4, dtype=torch.int32))
    assert out.shape == (0, 8)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_equal_scores_choose_the_first_experts():
    moe = layer(top_k=3)
    with torch.no_grad():
        moe.router.weight.zero_()
    weights, chosen = moe.router(torch.randn(1, 4, 16))
    assert chosen.tolist() == [[[0, 1, 2]] * 4]
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def losses_by_hand(moe: MoE, x: Tensor, keys: MoEConfig) -> Tensor:
    """The losses of the papers, summed over the tokens of all sequences."""
    logits = x @ moe.router.weight.t()
    scores = logits.softmax(-1)
    chosen = scores.topk(keys.top_k).indices
    length, total = x.shape[1], keys.z_loss * logits.logsumexp(-1).square().sum()
    for s, c in zip(scores, chosen, strict=True):
        frequency = torch.bincount(c.flatten(), minlength=keys.experts) * keys.experts / (keys.top_k * length)
        total = total + length * keys.sequence_loss * (frequency * s.mean(0)).sum()
    return total


@pytest.mark.parametrize(
    "keys", [{"z_loss": 0.3}, {"sequence_loss": 0.7}, {"z_loss": 0.1, "sequence_loss": 0.2}], ids=str
)
def test_the_routers_losses_and_their_gradients_are_those_of_the_formula(keys):
    moe, x, upstream = layer(**keys), torch.randn(3, 5, 16), torch.tensor(0.25)
    begin([moe], upstream)
    direction = torch.randn(3, 5, 16)
    (moe(x) * direction).sum().backward()
    found = {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}
    moe.zero_grad()
    expected = losses_by_hand(moe, x, config(**keys).moe)
    router = moe.router.sequence_loss, moe.router.z_loss
    moe.router.sequence_loss = moe.router.z_loss = 0.0
    ((moe(x) * direction).sum() + upstream * expected).backward()
    assert any(router)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    balance([moe], ONE)
    assert moe.router.losses.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_bias_moves_against_the_loads_of_all_micro_batches():
    moe = layer(bias_rate=0.5)
    begin([moe], torch.tensor(1.0))
    chosen = []
    for _ in range(2):
        x = torch.randn(2, 5, 16)
        chosen.append(moe.router(x)[1])
        moe(x).sum().backward()
    with torch.no_grad():
        moe(torch.randn(2, 5, 16))  # an evaluation does not count
    balance([moe], ONE)
    loads = torch.bincount(torch.cat(chosen).flatten(), minlength=8)
    assert torch.equal(moe.router.load, loads)
    assert loads.sum() == 2 * 2 * 5 * 2
    assert torch.equal(moe.router.bias, 0.5 * (loads.float().mean() - loads).sign())
    begin([moe], torch.tensor(1.0))
    assert not moe.router.load.any()


def test_the_bias_evens_the_loads_without_changing_weights():
    moe, x = layer(bias_rate=0.002), 0.5 * torch.randn(4, 64, 16) + 0.5 * torch.randn(16)  # tokens with much in common
    for step in range(220):
        begin([moe], torch.tensor(1.0))
        moe(x).sum().backward()
        balance([moe], ONE)
        if step == 0:
            first = Loads([moe.router.load.tolist()], [0.0]).metrics()["expert_imbalance"]
    last = Loads([moe.router.load.tolist()], [0.0]).metrics()
    assert last["expert_imbalance"] < 1.2 < 1.5 < first
    assert last["expert_entropy"] > 0.995


def test_the_metrics_of_loads_are_imbalance_and_entropy():
    loads = Loads.of([[4, 0, 4, 0, 8.0], [2, 2, 2, 2, 16.0]], tokens=4)
    assert loads.tokens == [[4, 0, 4, 0], [2, 2, 2, 2]]
    assert loads.metrics() == {"expert_imbalance": 2.0, "expert_entropy": pytest.approx(0.75), "router_loss": 6.0}


@pytest.mark.parametrize(
    "keys", [{}, {"every": 2}, {"shared": 1}, {"d_ff": None}, {"d_ff": None, "shared": 1, "top_k": 3}], ids=str
)
@pytest.mark.parametrize("kind", [MLPKind.gelu_tanh, MLPKind.swiglu], ids=lambda kind: kind.value)
def test_parameters_are_counted_once_in_all_and_flops_for_the_chosen_experts(keys, kind):
    model = config(**keys)
    model.mlp = kind
    built = GPT(model)
    assert sum(p.numel() for p in built.parameters()) == num_parameters(model)
    tokens, counter = torch.randint(32, (2, 8)), FlopCounterMode(display=False)
    with counter, torch.no_grad():
        built(tokens, tokens)
    attention = 2 * 2 * 2 * 16 * 8 * 8 * 2  # batches of two products of 8 positions, in two layers
    assert counter.get_total_flops() - attention == 2 * 16 * matmul_parameters(model)


def test_muon_steps_each_experts_matrices_by_themselves():
    torch.manual_seed(1)
    start, gradient = torch.randn(3, 8, 6), torch.randn(3, 8, 6)

    def stepped(named: list[tuple[str, nn.Parameter]], gradients: list[Tensor]) -> list[Tensor]:
        structure = GPTSpec().matrices(GPTConfig(mlp=MLPKind.swiglu, moe=MoEConfig(experts=3, d_ff=4)))
        optimizer = build_optimizer(MuonConfig(lr=0.1), named, structure)
        for (_, parameter), each in zip(named, gradients, strict=True):
            parameter.grad = each.clone()
        optimizer.step()
        return [parameter.detach() for _, parameter in named]

    (whole,) = stepped([("layers.0.mlp.experts.up", nn.Parameter(start.clone()))], [gradient])
    parts = [(start[e, place::2], gradient[e, place::2]) for e in range(3) for place in range(2)]
    alone = stepped([("layers.0.attn.proj.weight", nn.Parameter(p.clone())) for p, _ in parts], [g for _, g in parts])
    for index, each in enumerate(alone):
        torch.testing.assert_close(whole[index // 2, index % 2 :: 2], each)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.moe.top_k=9"], "model.moe.top_k=9 is above model.moe.experts=8"),
        (["model.moe.top_k=0"], "model.moe.top_k=0 must be at least 1"),
        (["model.moe.experts=-1"], "model.moe.experts=-1 must be 0"),
        (["model.moe.every=5"], "model.moe.every=5 is above model.num_layers=4"),
        (["model.moe.z_loss=-1"], "model.moe.z_loss=-1 must be at least 0"),
        (["model.moe.d_ff=6", "parallelism.tensor=4"], "model.moe.d_ff=6 is not divisible by parallelism.tensor=4"),
        (
            ["parallelism.expert=3"],
            "model.moe.experts=8 is not divisible by parallelism.expert=3; try parallelism.expert=1, 2",
        ),
        (["parallelism.expert=0"], "parallelism.expert=0 must be at least 1"),
        (["model.moe.experts=0", "parallelism.expert=2"], "parallelism.expert=2: the model has no experts"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        check_layout(load(["model=moe-lite", *overrides]))


def test_parallelize_recognizes_experts_and_routers():
    """By their base class and their attribute: dtype of the GEMMs, and left out of compiled blocks."""
    o1 = Policy(torch.bfloat16, "test", Precision.amp_o1)
    part = planned(GPT(config()), o1, compile=True)
    experts = [module for module in part.modules() if isinstance(module, Experts)]
    assert [each.matmul_dtype for each in experts] == [torch.bfloat16] * 2
    uncompiled = {type(module) for module in part.modules() if "forward" in vars(module)}
    assert uncompiled == {Experts, Router}
