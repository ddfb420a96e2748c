"""fp8 products against the same rounding written out in float64, and which layers multiply so."""

import math

import pytest
import torch

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize
from gptlite.ops import fp8
from gptlite.ops.fp8 import fp8_linear
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Precision, PrecisionConfig, resolve_precision

CPU = torch.device("cpu")
BF16 = 2.0**-8  # half of a unit in the last place, relative


def rounded(x: torch.Tensor, bits: int, lowest: int, largest: float) -> torch.Tensor:
    """x in a float format of `bits` fraction bits, whose least normal exponent is `lowest`, scaled to its `largest`.

    From the formats' definition (arXiv:2209.05433, table 1): round to nearest, ties to even.
    """
    x = x.double()
    scale = x.abs().max().float().double() / largest
    scaled = (x.float() / scale.float()).double()  # the quotient is taken in fp32
    exponent = torch.frexp(scaled)[1] - 1
    unit = torch.ldexp(torch.ones_like(scaled), exponent.clamp(min=lowest) - bits)
    return (scaled / unit).round() * unit * scale


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return rounded(x, 3, -6, 448.0)


def e5m2(x: torch.Tensor) -> torch.Tensor:
    return rounded(x, 2, -14, 57344.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(2, 16), (3, 7), (1, 1)], ids=str)
def test_each_product_is_that_of_rounded_tensors(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 32, generator=generator).mul(3).to(dtype).requires_grad_()
    weight = torch.randn(48, 32, generator=generator).mul(0.02).to(dtype).requires_grad_()
    bias = torch.randn(48, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(*rows, 48, generator=generator).mul(1e-3).to(dtype)
    out = fp8_linear(x, weight, bias)
    out.backward(grad)
    x2, g2 = x.detach().flatten(0, 1), grad.flatten(0, 1)
    close = {"rtol": 2 * BF16, "atol": 0.0}
    wanted = e4m3(x2) @ e4m3(weight.detach()).t()
    atol = BF16 * wanted.abs().max().item()
    found = (out.detach().flatten(0, 1) - bias.detach()).double()
    assert out.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=2 * BF16, atol=4 * BF16)  # the bias rounds the sum again
    for name, got, want in (
        ("x", x.grad.flatten(0, 1), e5m2(g2) @ e4m3(weight.detach())),
        ("weight", weight.grad, e5m2(g2).t() @ e4m3(x2)),
    ):
        atol = BF16 * want.abs().max().item() / 4
        torch.testing.assert_close(got.double(), want, rtol=close["rtol"], atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert bias.grad is not None


def test_a_tensor_of_zeros_gives_zeros():
    x = torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True)
    out = fp8_linear(x, torch.zeros(16, 16, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.abs().sum() == 0
    assert x.grad.abs().sum() == 0


def test_evaluation_writes_one_layout(monkeypatch):
    def none(*_):
        raise AssertionError("a layout for a backward pass that does not come")

    x, weight = torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.ones(32, 16, dtype=torch.bfloat16)
    want = fp8_linear(x, weight.requires_grad_())
    monkeypatch.setattr(fp8, "both_layouts", none)
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, weight), want)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "loops"), [(fp8.to_fp8, 1), (fp8.rounded_both, 2)])
@pytest.mark.parametrize("dtype", [fp8.INPUT, fp8.GRADIENT], ids=str)
def test_compiled_it_reads_a_tensor_once(function, loops, dtype):
    """The quotients, and them transposed: for all shapes at once, to the bit."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    fp8.compiled.cache_clear()
    metrics.reset()
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 48), (48, 48), (96, 160)):
        x = torch.randn(*shape, generator=generator).bfloat16()
        given = x, fp8.scale_of(x, dtype), dtype
        results = (call(*given) for call in (fp8.compiled(function), function))
        for got, want in zip(*(each if isinstance(each, tuple) else (each,) for each in results), strict=True):
            assert got.stride() == want.stride()
            assert torch.equal(got.float(), want.float())
        assert metrics.generated_kernel_count == loops


def test_the_linear_layers_of_blocks_multiply_in_fp8_and_the_head_does_not(monkeypatch):
    shapes, multiply = [], fp8.scaled_product

    def product(a, a_scale, b, b_scale, dtype, bias=None):
        shapes.append((a.shape[1], b.shape[1]))
        return multiply(a, a_scale, b, b_scale, dtype, bias)

    monkeypatch.setattr(fp8, "scaled_product", product)
    config = GPTConfig(
        num_layers=2, num_heads=2, d_model=32, d_ff=64, vocab_size=50, vocab_multiple=16, sequence_length=16
    )
    policy = resolve_precision(PrecisionConfig(Precision.fp8), CPU)
    (model,) = parallelize(Model.of(config, policy), GPT(config), Mesh(CPU), ParallelismConfig(), policy)
    tokens = torch.arange(32).view(2, 16)
    loss = model(tokens, tokens, torch.tensor([0, 1]))
    assert shapes == [(32, 96), (32, 32), (32, 64), (64, 32)] * 2
    loss.backward()
    assert len(shapes) == 3 * 8
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_it_trains_as_bf16_does(run, tmp_path):
    from run_files import read_metrics, without_plots

    curves = {}
    for precision in ("bf16", "fp8"):
        with without_plots():
            code, _ = run(precision, f"precision={precision}", "trainer.max_steps=40", "optimizer.lr=3e-3")
        assert code == 0
        curves[precision] = [row["loss"] for row in read_metrics(tmp_path / precision) if "loss" in row]
    assert curves["bf16"][-1] < 0.75 * math.log(257)
    assert curves["fp8"] == pytest.approx(curves["bf16"], rel=0.03)
    assert curves["fp8"] != curves["bf16"]


def test_sizes_and_gpus_that_fp8_does_not_support_are_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match=r"model.d_ff=100 is not divisible by 16, .*model.d_ff=112$"):
        load([*tiny, "run.dir=x", "run.name=x", "precision=fp8", "model.d_ff=100"])
    with pytest.raises(ConfigError, match=r"model.d_model=32 .* by 16 x parallelism.tensor=4, .*model.d_model=64$"):
        load([*tiny, "run.dir=x", "run.name=x", "precision=fp8", "parallelism.tensor=4", "model.num_heads=4"])
    head = [*tiny, "run.dir=x", "run.name=x", "precision.fp8_head=true"]
    for more, message in (
        (
            ["precision=bf16", "model.d_model=72", "model.num_heads=3"],
            r"model\.d_model=72 .* by 16, as precision.fp8_head",
        ),
        (
            ["precision=fp16"],
            r"precision\.fp8_head=true is not supported with precision=fp16; use precision=bf16 or fp8",
        ),
        (["precision=auto"], r"fp8_head=true is not supported with precision=auto"),
    ):
        with pytest.raises(ConfigError, match=message):
            load([*head, *more])
    load([*head, "precision=bf16", "model.d_ff=100", "parallelism.tensor=4", "model.num_heads=4"])
    config = PrecisionConfig(Precision.fp8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ConfigError, match=r"precision=fp8: sm_80 has no fp8, which needs sm_89 .*use precision=bf16"):
        resolve_precision(config, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert resolve_precision(config, torch.device("cuda", 0)).fp8

    def missing(*_, **__):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", missing)
    with pytest.raises(ConfigError, match=r"has no fp8 GEMM for cpu \(no such kernel\)"):
        resolve_precision(config, CPU)
