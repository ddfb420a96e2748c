"""Gradients of a whole model in bf16, by each attention that a device has, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.ops.config import Attention, CrossEntropy, OpsConfig
from gptlite.ops.select import Ops, select_ops

CONFIG = GPTConfig(vocab_size=501, num_layers=2, num_heads=2, d_model=128, sequence_length=64, init_std=0.05)
BATCH = 3
# A kernel rounds about as often as torch's ops do, in another order: it may be twice as far from fp64 as these are in
# the same dtype on the same device, or a rounding of bf16 off.
TIMES, FLOOR = 2.0, 2**-9
REFERENCE = Ops(Attention.matmul, CrossEntropy.reference)


@dataclass
class GradientRow:
    """How far one attention's gradients are from fp64, relative to each gradient's norm."""

    attention: str
    worst: float
    parameter: str
    loss: float
    limit: float
    verdict: str  # fine, reference, or what is wrong


def gradient_rows(device: torch.device) -> list[GradientRow]:
    """A row for each."""
    exact = _gradients(REFERENCE, torch.float64, torch.device("cpu"))
    plain = _errors(_gradients(REFERENCE, torch.bfloat16, device), exact)
    worst = max((name for name in plain if name != "loss"), key=lambda name: plain[name])
    rows = [GradientRow("reference ops", plain[worst], worst, plain["loss"], plain[worst], "reference")]
    ours = select_ops(OpsConfig(), device)
    for label, choice, backend in _attentions(device):
        ops = replace(ours, attention=choice)
        try:
            if backend is None:
                found = _gradients(ops, torch.bfloat16, device)
            else:
                with sdpa_kernel(backend):
                    found = _gradients(ops, torch.bfloat16, device)
        except RuntimeError as error:
            missing = "No available kernel" in str(error)
            what = "not here: torch has no such kernel for it" if missing else str(error).splitlines()[0]
            rows.append(GradientRow(label, float("nan"), "", float("nan"), float("nan"), what))
            continue
        rows.append(_row(label, _errors(found, exact), plain))
    return rows


def _row(label: str, errors: dict[str, float], plain: dict[str, float]) -> GradientRow:
    limits = {name: max(TIMES * plain[name], FLOOR) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / limits[name] if errors[name] == errors[name] else float("inf"))
    fine = all(errors[name] <= limits[name] for name in errors)  # NaN is not
    verdict = "fine" if fine else f"{worst} is off by {errors[worst]:.2e}, more than {limits[worst]:.2e}"
    return GradientRow(label, errors[worst], worst, errors["loss"], limits[worst], verdict)


def _attentions(device: torch.device) -> Iterator[tuple[str, Attention, SDPBackend | None]]:
    backends = (
        ("FLASH_ATTENTION", "MATH")
        if device.type == "cpu"
        else (*("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),)
    )
    yield "sdpa, torch's choice", Attention.sdpa, None
    for name in backends:
        yield f"sdpa, {name.removesuffix('_ATTENTION').lower()}", Attention.sdpa, getattr(SDPBackend, name)
    yield "fused_softmax", Attention.fused_softmax, None
    yield "matmul", Attention.matmul, None
    if device.type == "cpu":
        yield "fused", Attention.fused, None


def _gradients(ops: Ops, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The loss's, under its name, and each parameter's gradient."""
    model = GPT(CONFIG, ops, seed=3)
    init_weights(Model.of(CONFIG), model, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # gains and biases that are not 1 and 0
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.compute_dtype = dtype
    model = (model.double() if dtype == torch.float64 else model).to(device)
    tokens = torch.randint(CONFIG.vocab_size or 1, (BATCH, CONFIG.sequence_length + 1), generator=generator).to(device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu().double(), **gradients}


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
