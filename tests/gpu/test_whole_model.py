"""Loss and gradients of a whole model with the kernels on, for each attention, against reference ops in fp64."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from dispatched import Watching
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptlite.kernels.library import LoadedLibrary, load
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.ops.config import Attention, CrossEntropy
from gptlite.ops.inputs import IGNORE
from gptlite.ops.select import Ops
from gptlite.optimizer.fused import FusedAdamW, clip_and_step
from gpu.device import DEVICE

FP32, BF16 = torch.float32, torch.bfloat16
REFERENCE = Ops(Attention.matmul, CrossEntropy.reference)
KERNELS = Ops(
    *(Attention.matmul, CrossEntropy.fused), layer_norm=True, activation=True, dropout=True, adamw=True, table=True
)
CONFIG = GPTConfig(
    vocab_size=501, vocab_multiple=128, num_layers=2, num_heads=2, d_model=128, sequence_length=64, init_std=0.05
)
DROPOUT = 0.1
BATCH, SEED = 3, 3

# Of a gradient's norm, for each parameter, and of the loss. A kernel rounds where torch's op does or less often, but in
# another order: it may be `TIMES` as far from fp64 as the reference ops of the same dtype on the same device, which the
# test measures. Below `FLOOR` both are rounding noise: 32 roundings of fp32 in a row, one of bf16.
TIMES = 2.0
FLOOR = {FP32: 32 * 2**-24, BF16: 2**-9}
LOSS_FLOOR = {FP32: 16 * 2**-24, BF16: 2**-9 / 16}  # a mean over tokens: their errors are independent
MOST_BF16_ERROR = 0.05  # of the reference ops: where it is larger, "twice as far" says nothing

FLASH, MATH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
SDPA = {"cpu": {FP32: (FLASH, MATH), BF16: (FLASH, MATH)}}
SDPA["cuda"] = {FP32: (EFFICIENT, MATH), BF16: (FLASH, EFFICIENT, CUDNN, MATH)}  # flash and cuDNN take 16 bits alone
SDPA_OPS = {  # as a dispatch trace has them; MATH is made of other ops
    FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention",
    CUDNN: "_scaled_dot_product_cudnn_attention",
}
WRITTEN_OUT = (Attention.fused_softmax, Attention.matmul, *((Attention.fused,) if DEVICE.type == "cpu" else ()))


@dataclass(frozen=True)
class Case:
    """What runs, beside the kernels. `backend`: the only one that SDPA may take."""

    dtype: torch.dtype
    attention: Attention
    backend: SDPBackend | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        parts = self.dtype, self.attention.value, self.backend and self.backend.name, self.dropout and "dropout"
        return "-".join(str(part).removeprefix("torch.").lower() for part in parts if part)


CASES = [
    *(Case(dtype, Attention.sdpa, backend) for dtype in (FP32, BF16) for backend in SDPA[DEVICE.type][dtype]),
    *(Case(dtype, attention) for dtype in (FP32, BF16) for attention in WRITTEN_OUT),
    # SDPA draws no mask of ours: with dropout it is the written-out attention that runs
    *(
        Case(dtype, each, dropout=DROPOUT)
        for dtype in (FP32, BF16)
        for each in (Attention.sdpa, *WRITTEN_OUT)
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    loss: Tensor
    gradients: dict[str, Tensor]

    def errors(self, truth: "Result") -> dict[str, float]:
        """Relative to the norm, of each parameter's gradient and, under "loss", of the loss; NaN where there is one."""
        pairs = {"loss": (self.loss, truth.loss)}
        pairs |= {name: (self.gradients[name], truth.gradients[name]) for name in truth.gradients}
        return {name: ((a.cpu().double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    loaded = load(DEVICE.type)
    assert isinstance(loaded, LoadedLibrary), loaded.reason


def make(config: GPTConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> GPT:
    """The same weights whatever the ops, with gains and biases that are not 1 and 0."""
    model = GPT(config, ops, seed=SEED)
    init_weights(Model.of(config), model, seed=SEED)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.compute_dtype = dtype
    return (model.double() if dtype == torch.float64 else model).to(device)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of which some count nothing, sample ids of which some need 64 bits."""
    tokens = torch.randint(CONFIG.vocab_size or 0, (BATCH, 65), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 5:9] = IGNORE
    return tokens[:, :-1], targets, torch.tensor([4, 2**33 + 1, 0])


def trained(model: GPT) -> Result:
    tokens, targets, ids = (each.to(DEVICE) for each in batch())
    loss = model(tokens, targets, ids)
    loss.backward()
    return Result(loss.detach(), gradients_of(model))


def gradients_of(model: GPT) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@cache
def truth(dropout: float) -> Result:
    """In fp64 on a CPU by torch's ops and autograd: SDPA's definition, the loss of the rows that are no padding."""
    config = replace(CONFIG, dropout=dropout)
    model = make(config, replace(REFERENCE, attention=Attention.sdpa), torch.float64, torch.device("cpu"))
    tokens, targets, ids = batch()
    assert model.head is not None
    with only(MATH):
        hidden = model.hidden(tokens, ids)
    logits = hidden @ model.head.weight[: config.vocab_size].t()  # type: ignore[operator, index]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    assert loss.dtype == torch.float64
    loss.backward()
    return Result(loss.detach(), gradients_of(model))


@cache
def reference_errors(dtype: torch.dtype, dropout: float) -> dict[str, float]:
    """How far the reference ops are off in a dtype on the device."""
    model = make(replace(CONFIG, dropout=dropout), REFERENCE, dtype, DEVICE)
    return trained(model).errors(truth(dropout))


@contextmanager
def only(backend: SDPBackend | None) -> Iterator[None]:
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield


def test_the_reference_ops_are_near() -> None:
    """Else the comparison with them says nothing."""
    for dropout in (0.0, DROPOUT):
        assert max(reference_errors(FP32, dropout).values()) < 1e-4
        assert max(reference_errors(BF16, dropout).values()) < MOST_BF16_ERROR


def model_of(case: Case, ops: Ops = KERNELS) -> GPT:
    """With the kernels that a GPU has beside SDPA, where a case has SDPA."""
    beside = ops.dropout and case.attention is Attention.sdpa
    ops = replace(ops, attention=case.attention, fused_scores=beside)
    return make(replace(CONFIG, dropout=case.dropout), ops, case.dtype, DEVICE)


def errors_of(case: Case, ops: Ops = KERNELS) -> dict[str, float]:
    """How far a case is off, which tools/bench_gpu.py asks, too."""
    model = model_of(case, ops)
    with only(case.backend):
        return trained(model).errors(truth(case.dropout))


def limits_of(case: Case) -> dict[str, float]:
    """How far it may be off."""
    floors = {"loss": LOSS_FLOOR[case.dtype]}
    allowed = reference_errors(case.dtype, case.dropout)
    return {name: max(TIMES * error, floors.get(name, FLOOR[case.dtype])) for name, error in allowed.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case: Case) -> None:
    errors, limits = errors_of(case), limits_of(case)
    assert limits.keys() == errors.keys()
    off = {name: f"{error:.2e}, not {limits[name]:.2e}" for name, error in errors.items() if not error <= limits[name]}
    assert off == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_case_is_about_runs(case: Case) -> None:
    """The kernels, and the attention."""
    model = model_of(case)
    names: set[str] = set()
    with Watching(lambda func, args, out: names.add(func.name().partition(".")[0])), only(case.backend):
        trained(model)
    pairs = ("layer_norm", "residual_norm", "bias_activation", *(("causal_softmax",) if writes_out(case) else ()))
    expected = {f"gptlite::{name}{end}" for name in pairs for end in ("", "_backward")}
    expected |= {"gptlite::cross_entropy_", *(("gptlite::dropout",) if case.dropout else ())}
    expected |= {"gptlite::join_heads"} if case.attention is Attention.sdpa else set()
    expected |= {"gptlite::add_token_rows_"} if DEVICE.type == "cuda" else set()
    assert expected - {name.removesuffix("_") if "softmax" in name else name for name in names} == set()
    ran = {name for name in names if "scaled_dot_product" in name}
    wanted = SDPA_OPS.get(case.backend) if case.backend else None
    assert all(wanted and name.startswith(f"aten::{wanted}") for name in ran)
    assert bool(ran) == bool(wanted)


def writes_out(case: Case) -> bool:
    """Whether the softmax is a kernel of ours."""
    return case.attention is Attention.fused_softmax or (case.attention is Attention.fused and case.dropout > 0)


def test_steps_of_adamw() -> None:
    """Clipped, with the gradients of a model: the parameters move as in fp64, to a tenth of the learning rate."""
    rate, steps = 1e-2, 3
    fused = make(CONFIG, KERNELS, FP32, DEVICE)
    plain = make(CONFIG, REFERENCE, torch.float64, torch.device("cpu"))
    options = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours = FusedAdamW(fused.parameters(), **options, fused=True)
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    for _ in range(steps):
        fused.zero_grad()
        trained(fused)
        for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.cpu().double()
        norm = torch.ops.gptlite.norm([each.grad for each in fused.parameters()])
        clip_and_step(ours, fused.parameters(), 0.5, norm)
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item() == pytest.approx(norm.item(), rel=1e-6)
        theirs.step()
    for (name, mine), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert ((mine.cpu() - other).abs().max() / rate).item() <= 0.1, name


def test_the_same_loss_and_gradients_twice() -> None:
    """Bit for bit: no kernel sums in an order of chance, of the rows of a token neither, and masks depend on places
    alone."""
    config, ops = replace(CONFIG, dropout=DROPOUT), replace(KERNELS, attention=Attention.fused_softmax)
    model = make(config, ops, BF16, DEVICE)
    one, other = trained(copy.deepcopy(model)), trained(model)
    assert torch.equal(one.loss, other.loss)
    assert [name for name in one.gradients if not torch.equal(one.gradients[name], other.gradients[name])] == []
