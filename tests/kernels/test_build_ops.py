"""The library as torch sees it: torch.compile, and arguments that are refused; tests/gpu has schemas and fakes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlite.kernels.activation import ACTIVATIONS
from gptlite.kernels.cases import CASES
from gptlite.kernels.cases_lists import ADAM
from gptlite.kernels.check import measure
from gptlite.kernels.fakes import FAKES
from gptlite.kernels.library import Unavailable, load

slow = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def ops() -> Any:
    loaded = load("cpu")
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    return torch.ops.gptlite


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Small arguments of an op."""
    torch.manual_seed(0)
    base = name.removesuffix("_").removesuffix("_backward")
    name = name.replace("_amax", "")  # an op with the amax of its result takes what the op without takes
    scores, x = torch.randn(2, 3, 5, 7, dtype=dtype), torch.randn(2, 5, 12, dtype=dtype)
    vector, statistic = torch.randn(12, dtype=dtype), torch.rand(2, 5)
    key = (0.3, 5, torch.tensor(3), torch.tensor([1, 2**40]), 2)
    logits, targets = torch.randn(6, 11, dtype=dtype), torch.tensor([0, 10, -100, 3, 4, 5])
    heads, packed = torch.randn(2, 3, 5, 8, dtype=dtype), torch.randn(2, 5, 3, 3, 8, dtype=dtype)
    lse, angles = torch.randn(2, 3, 5), torch.rand(2, 1, 5, 1, 1, 4).unbind()
    floats = [torch.rand(3, 4), torch.rand(5), torch.rand(())]
    match name.rstrip("_"):
        case "masked_softmax":
            return scores, torch.rand(5, 7) < 0.5, 0.5
        case "causal_softmax":
            return scores, 0.5
        case "masked_softmax_backward" | "causal_softmax_backward":
            return scores, torch.rand(2, 3, 5, 7).to(dtype), 0.5
        case "layer_norm":
            return x, vector, vector.clone(), 1e-5
        case "layer_norm rms":
            return x, None, None, 1e-5, True
        case "layer_norm_backward rms":
            return x, x.clone(), None, None, statistic, False
        case "layer_norm_backward":
            return x, x.clone(), vector, statistic, statistic.clone(), True
        case "residual_norm":
            return x, vector, x.clone(), vector.clone(), vector.clone(), 1e-5, *key
        case "residual_norm rms":
            return x, vector, x.clone(), None, None, 1e-5, *key, True
        case "residual_norm_backward rms":
            return x, x.clone(), x.clone(), vector, None, statistic, True, False, *key
        case "residual_norm_backward":
            return x, x.clone(), x.clone(), vector, statistic, statistic.clone(), True, False, *key
        case "bias_activation":
            return x, vector, ACTIVATIONS["swiglu"]
        case "bias_activation_backward":
            return x[..., :6].clone(), x, vector, ACTIVATIONS["swiglu"]
        case "rope":
            return packed, *angles, vector[:8], vector[:8].clone(), 1e-5
        case "rope_backward":
            return packed, packed.clone(), *angles, vector[:8], vector[:8].clone(), 1e-5
        case "join_heads":
            return torch.randn(2, 5, 6, 8, dtype=dtype), *torch.randn(2, 2, 5, 3, 8, dtype=dtype).unbind(), True, True
        case "add_token_rows":
            return torch.randn(4, 12), x[0], torch.tensor([0, 0, 1, 3, 3]), torch.tensor([4, 1, 0, 2, 3])
        case "dropout":
            return x, *key, 0
        case "cross_entropy":
            return logits, targets, 1e-3, -100, True
        case "cross_entropy_stats":
            return logits, targets, 0, -100
        case "cross_entropy_gradient":
            return logits, targets, torch.randn(6), 0, 1e-3, -100
        case "quantize_blocks":
            return torch.randn(3, 1024), torch.rand(3, 1024) < 0.5, 1
        case "dequantize_blocks":
            codes, scales = torch.randint(0, 256, (3 * 256,), dtype=torch.uint8), torch.rand(3)
            return torch.cat([scales.view(torch.uint8), codes]), None, 3, 8
        case "quantize_fp8":
            return x.flatten(0, 1), torch.tensor(3.0), True, True
        case "norm":
            return ([*floats, torch.rand(3).to(dtype)],)
        case "adamw":
            lists = [[t.clone() for t in floats] for _ in range(4)]
            numbers = [torch.tensor(2.0) for _ in floats], *ADAM, False, torch.tensor(0.5), torch.tensor([0.0])
            copies, rate = [t.bfloat16() if t.ndim else t.new_empty(0) for t in floats], torch.tensor(1e-3).double()
            return *lists, *numbers, copies, rate
        case "weight_gradient":
            if "avx512_bf16" not in getattr(load("cpu"), "isa", ""):
                pytest.skip("no AVX512-BF16 here")
            return x.bfloat16(), x.bfloat16().clone(), True, True  # of bf16 alone
        case "attention":
            return heads, heads.clone(), heads.clone(), 0.3
        case "attention_backward":
            return heads, heads.clone(), lse, heads.clone(), heads.clone(), heads.clone(), 0.3
        case "attention_packed":
            return packed, 0.3
        case "attention_packed_backward":
            return heads.transpose(1, 2), heads.transpose(1, 2).clone(), lse, packed, 0.3
    raise AssertionError(base)


def flat(values: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results."""
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from flat(value)


def copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with tensors of their own."""
    return tuple(
        [t.clone() for t in v] if isinstance(v, list) else v.clone() if isinstance(v, Tensor) else v for v in values
    )


RMS = tuple(f"{name} rms" for name in FAKES if "_norm" in name)  # the layer norms' ops, called for an RMS norm


@slow
@pytest.mark.parametrize("name", [*FAKES, *RMS])
def test_compiled_in_one_graph_it_does_the_same(ops: Any, name: str) -> None:
    op, given = getattr(ops, name.removesuffix(" rms")), arguments(name)
    torch.compiler.reset()
    compiled = torch.compile(lambda *values: op(*values), fullgraph=True, backend="aot_eager")
    ours, theirs = copied(given), copied(given)
    results, expected = compiled(*ours), op(*theirs)
    for a, b in zip([*flat(results), *flat(ours)], [*flat(expected), *flat(theirs)], strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@slow
def test_inductor_takes_functional_and_in_place_ops_together(ops: Any) -> None:
    def several(x: Tensor, weight: Tensor, scores: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        y, _, _ = ops.layer_norm(x + 1, weight, None, 1e-5)
        scores = scores * 2
        ops.causal_softmax_(scores, 0.5)
        logits = logits * 2
        losses = ops.cross_entropy_(logits, targets, 0.0, -100, True)
        return ops.bias_activation(y, weight, ACTIVATIONS["relu2"]) * 2, scores + 1, losses, logits + 1

    values = (*arguments("layer_norm")[:2], arguments("causal_softmax")[0], *arguments("cross_entropy_")[:2])
    for a, b in zip(torch.compile(several, fullgraph=True)(*values), several(*values), strict=True):
        torch.testing.assert_close(a, b)


@slow
def test_the_self_check_sees_an_error() -> None:
    case = next(case for case in CASES if case.ops[0] == "layer_norm")
    wrong = replace(case, kernel=lambda inputs: (inputs["x"], inputs["x"], inputs["x"]), kernel_backward=lambda *_: ())
    assert not any(error.fine for error in measure(wrong, CPU))


@pytest.mark.parametrize(
    "name",
    [
        *("layer_norm", "masked_softmax", "bias_activation", "rope", "dropout", "attention", "cross_entropy_stats"),
        *("quantize_blocks", "join_heads"),
    ],
)
def test_layouts_that_a_kernel_does_not_take_are_made_contiguous(ops: Any, name: str) -> None:
    first, *rest = arguments(name)
    apart = torch.stack([first, first], dim=-1)[..., 0]
    assert not apart.is_contiguous()
    if name == "cross_entropy_stats":
        apart = torch.cat([first, first], dim=1)[:, : first.shape[1]]  # rows may lie apart, elements not
    for a, b in zip(flat(getattr(ops, name)(apart, *rest)), flat(getattr(ops, name)(first, *rest)), strict=True):
        assert torch.equal(a, b)


REFUSED = {
    "join_heads of other widths": ("join_heads", {1: torch.zeros(2, 5, 3, 7)}, r"dk must be \[2, 5, 3, 8\]"),
    "join_heads of too few queries": ("join_heads", {0: torch.zeros(2, 5, 4, 8)}, "a multiple of dk's 3 heads, not 4"),
    "join_heads of two dtypes": ("join_heads", {2: torch.zeros(2, 5, 3, 8).half()}, "dv must be of the dtype of dk"),
    "add_token_rows_'s table": ("add_token_rows_", {0: torch.zeros(4, 12).half()}, "table must be of float32"),
    "add_token_rows_'s widths": ("add_token_rows_", {0: torch.zeros(4, 11)}, "matrices of the same width"),
    "add_token_rows_'s order": ("add_token_rows_", {3: torch.zeros(4).long()}, r"must be \[5\], not \[4\]"),
    "layer_norm of float64": (
        "layer_norm",
        {0: torch.zeros(2, 12).double()},
        "x must be of float32, bfloat16 or float16",
    ),
    "layer_norm of int64": ("layer_norm", {0: torch.zeros(2, 12).long()}, "x must be of float32"),
    "layer_norm's weight": ("layer_norm", {1: torch.zeros(11)}, r"weight must be \[12\], not \[11\]"),
    "layer_norm's bias": ("layer_norm", {2: torch.zeros(12).bfloat16()}, "bias must be of the dtype of weight"),
    "layer_norm without a weight": ("layer_norm", {1: None}, "a layer norm must have a weight"),
    "layer_norm's gradient without a mean": ("layer_norm_backward", {3: None}, "an RMS norm has no bias"),
    "rms_norm's bias": ("layer_norm rms", {2: torch.zeros(12)}, "an RMS norm has no bias"),
    "rms_norm's bias before": ("residual_norm rms", {1: torch.zeros(12).half()}, "bias must be of the dtype of x"),
    "layer_norm of a number": ("layer_norm", {0: torch.zeros(())}, "x must have a dim at least"),
    "softmax's dims": ("masked_softmax", {0: torch.zeros(3, 4)}, r"x must be \[batch, heads, queries, keys\]"),
    "softmax's mask": ("masked_softmax", {1: torch.zeros(4, 7).bool()}, "does not broadcast"),
    "softmax's mask's dtype": ("masked_softmax", {1: torch.zeros(5, 7).long()}, "mask must be of bool"),
    "softmax's gradient": ("masked_softmax_backward", {1: torch.zeros(2, 3, 5, 8)}, "y must be"),
    "softmax in place": ("causal_softmax_", {0: torch.zeros(5, 7).t()}, "must be contiguous"),
    "p": ("dropout", {1: 1.0}, "p must be at least 0 and less than 1"),
    "seed": ("dropout", {2: 2**32}, "seed must be"),
    "sample_ids": ("dropout", {4: torch.tensor([1])}, "sample_ids must be"),
    "site": ("dropout", {3: torch.tensor(1.0)}, "site must be of int64"),
    "targets": ("cross_entropy_", {1: torch.zeros(5).long()}, "targets must be"),
    "targets' dtype": ("cross_entropy_", {1: torch.zeros(6).int()}, "targets must be of int64"),
    "logits' layout": ("cross_entropy_", {0: torch.zeros(11, 6).t()}, "rows of logits must be contiguous"),
    "norm's dtype": ("norm", {0: [torch.zeros(2).double()]}, "each tensor must be of float32"),
    "adamw's lists": ("adamw_", {1: []}, "must be as many"),
    "adamw's copies": ("adamw_", {13: [torch.zeros(3, 4).bfloat16()]}, "as many as parameters, or none"),
    "adamw's copy": ("adamw_", {13: [torch.zeros(3, 4)] * 3}, "must be bf16 or fp16"),
    "adamw's rate": ("adamw_", {14: torch.zeros(())}, "rate must be of float64"),
    "adamw's gradient": ("adamw_", {1: [torch.zeros(4, 3), torch.zeros(5), torch.zeros(())]}, "gradient must be"),
    "adamw's parameter": ("adamw_", {0: [torch.zeros(3, 4).half()] * 3}, "must be of float32"),
    "quantize_blocks of bf16": ("quantize_blocks", {0: torch.zeros(3, 1024).bfloat16()}, "x must be of float32"),
    "quantize_blocks' width": ("quantize_blocks", {2: 8}, r"x must be \[blocks, 256\], not \[3, 1024\]"),
    "quantize_blocks' bits": ("quantize_blocks", {2: 2}, "bits must be 8, 4 or 1, not 2"),
    "quantize_blocks' mask": ("quantize_blocks", {1: torch.ones(3, 512).bool()}, r"mask must be \[3, 1024\]"),
    "quantize_blocks' mask's dtype": ("quantize_blocks", {1: torch.ones(3, 1024)}, "mask must be of bool"),
    "dequantize_blocks' message": ("dequantize_blocks", {2: 4}, r"message must be \[1040\], not \[780\]"),
    "dequantize_blocks' dtype": ("dequantize_blocks", {0: torch.zeros(780).char()}, "message must be of uint8"),
    "dequantize_blocks' alignment": (
        "dequantize_blocks",
        {0: torch.zeros(784, dtype=torch.uint8)[1:781]},
        "message must be aligned to 4 bytes",
    ),
    "attention's keys": ("attention", {1: torch.zeros(2, 3, 4, 8)}, "as many keys as queries"),
    "attention's values": ("attention", {2: torch.zeros(2, 3, 5, 4)}, "v must be"),
    "attention's dtypes": ("attention", {1: torch.zeros(2, 3, 5, 8).half()}, "k must be of the dtype of q"),
    "attention's packing": ("attention_packed", {0: torch.zeros(2, 5, 3, 2, 8)}, "qkv must be"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_an_error_that_says_which(ops: Any, what: str) -> None:
    name, changes, message = REFUSED[what]
    given = list(arguments(name))
    for index, value in changes.items():
        given[index] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name.removesuffix(" rms"))(*given)


@slow
@pytest.mark.parametrize(
    "name", ["layer_norm", "masked_softmax", "bias_activation", "cross_entropy_stats", "attention"]
)
def test_nothing_at_all_is_no_error(ops: Any, name: str) -> None:
    given = [
        v[:0] if i == 0 or (name, i) in (("cross_entropy_stats", 1),) else v for i, v in enumerate(arguments(name))
    ]
    if name == "attention":
        given[1:3] = given[0], given[0]
    assert all(result.numel() == 0 or result.dim() == 1 for result in flat(getattr(ops, name)(*given)))


@slow
def test_a_norm_over_several_dtypes(ops: Any) -> None:
    tensors = [
        torch.randn(n).to(dtype) for n, dtype in ((100, torch.float32), (30, torch.bfloat16), (7, torch.float16))
    ]
    expected = torch.cat([t.double() for t in tensors]).norm()
    assert ops.norm(tensors).item() == pytest.approx(expected.item(), rel=1e-6)


@slow
def test_memory_layout_of_attention(ops: Any) -> None:
    out, _ = ops.attention(*arguments("attention"))
    assert out.transpose(1, 2).is_contiguous()


def test_a_gradient_in_e5m2_needs_rows_of_bf16_that_are_aligned(ops) -> None:
    targets, wrong = torch.zeros(3, dtype=torch.int64), []
    for dtype, stride, room, made in (
        (torch.bfloat16, 16, 16, torch.uint8),
        (torch.float32, 16, 16, torch.uint8),
        (torch.bfloat16, 13, 16, torch.uint8),
        (torch.bfloat16, 16, 13, torch.uint8),
        (torch.bfloat16, 16, 16, torch.int8),
    ):
        logits, gradient = torch.zeros(3, stride, dtype=dtype)[:, :13], torch.ones(3, room, dtype=made)[:, :13]
        try:
            ops.cross_entropy_(logits, targets, 0.0, -100, True, 1.0, gradient)
            assert (gradient.view(torch.float8_e5m2)[:, 0].float() == -0.875).all()  # 1/13 - 1, of 3 significant bits
        except RuntimeError as error:
            wrong.append(str(error).splitlines()[0])
    assert len(wrong) == 4
    assert all("e5m2" in each for each in wrong)
