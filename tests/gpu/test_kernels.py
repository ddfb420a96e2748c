"""The kernels' tests (tests/kernels) on the device, through torch.ops.gptlite.

Attention and the weight's gradient are kernels for CPUs alone, and are not among them. Two cases are skipped that torch
cannot express: dropout of p=0 and the norm of no tensors.
"""

import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from kernels.backends import Backend
from kernels.options import Adam, Dropout, Loss, State
from torch import Tensor

from gptlite.kernels.activation import ACTIVATIONS
from gptlite.kernels.library import LoadedLibrary, load
from gpu.device import DEVICE, ON_A_CPU_SLOW
from kernels import (
    test_adamw,
    test_alignment,
    test_bias_activation,
    test_blocks,
    test_cross_entropy,
    test_dropout,
    test_join_heads,
    test_layer_norm,
    test_norm,
    test_quantize_fp8,
    test_residual_norm,
    test_rms_norm,
    test_rope,
    test_softmax,
    test_token_rows,
)
from kernels.cases import BEST

OPS = torch.ops.gptlite


@dataclass(frozen=True)
class TorchOps:
    """kernels.backends.Backend's methods by torch's ops, from CPU tensors to CPU tensors."""

    offsets: tuple[int, ...] = (0,)
    # A CPU in a GPU's place is asked what a GPU is.
    is_cpu = False
    is_emulated = False

    def having(self, **changes: object) -> "TorchOps":
        return replace(self, **changes)

    def of_case(self, name: str) -> "TorchOps":
        return self

    def masked_softmax_forward(self, x, mask, scale, in_place=False) -> Tensor:
        x, mask = self._there(x, mask)
        return self._in_place(OPS.masked_softmax, OPS.masked_softmax_, in_place, x, mask, scale)

    def masked_softmax_backward(self, dy, y, scale, in_place=False) -> Tensor:
        dy, y = self._there(dy, y)
        return self._in_place(OPS.masked_softmax_backward, OPS.masked_softmax_backward_, in_place, dy, y, scale)

    def causal_softmax_forward(self, x, scale, in_place=False) -> Tensor:
        return self._in_place(OPS.causal_softmax, OPS.causal_softmax_, in_place, *self._there(x), scale)

    def causal_softmax_backward(self, dy, y, scale) -> Tensor:
        return OPS.causal_softmax_backward(*self._there(dy, y), scale).cpu()

    def layer_norm_forward(self, x, weight, bias, eps, rms=False) -> list[Tensor | None]:
        y, mean, rstd = _noted("layer_norm", 0, *self._there(x, weight, bias), eps, rms)
        return [y, None if rms else mean, rstd]

    def layer_norm_backward(self, dy, x, weight, mean, rstd, want_bias=True) -> list[Tensor | None]:
        dx, dweight, dbias = _here(OPS.layer_norm_backward(*self._there(dy, x, weight, mean, rstd), want_bias))
        return [dx, None if weight is None else dweight, dbias if want_bias else None]

    def residual_norm_forward(self, x, bias, residual, weight, beta, eps, dropout, rms=False) -> list[Tensor | None]:
        tensors = self._there(x, bias, residual, weight, beta)
        y, h, mean, rstd = _noted("residual_norm", 0, *tensors, eps, *_dropout(dropout), rms)
        return [y, h, None if rms else mean.flatten(), rstd.flatten()]

    def residual_norm_backward(
        self, dy, dh, h, weight, mean, rstd, dropout, want_bias=True, want_beta=True
    ) -> list[Tensor | None]:
        mean, rstd = None if mean is None else mean.view(h.shape[:2]), rstd.view(h.shape[:2])
        tensors, options = self._there(dy, dh, h, weight, mean, rstd), (want_bias, want_beta, *_dropout(dropout))
        written = 0 if dropout else 1
        dx, dresidual, dbias, dweight, dbeta = _noted("residual_norm_backward", written, *tensors, *options)
        return [
            dx if dropout else None, dresidual, dbias if want_bias else None, None if weight is None else dweight,
            dbeta if want_beta else None,
        ]  # fmt: skip

    def bias_activation_forward(self, x, bias, kind) -> Tensor:
        return _noted("bias_activation", 0, *self._there(x, bias), ACTIVATIONS[kind])[0]

    def bias_activation_backward(self, dy, x, bias, kind) -> tuple[Tensor, Tensor | None]:
        dx, dbias = _noted("bias_activation_backward", 0, *self._there(dy, x, bias), ACTIVATIONS[kind])
        return dx, None if bias is None else dbias

    def rope_forward(self, qkv, angles, gains, eps) -> Tensor:
        return OPS.rope(*self._there(*_packed(angles, qkv), *gains), eps).view(qkv.shape).cpu()

    def rope_backward(self, dout, qkv, angles, gains, eps) -> list[Tensor | None]:
        tensors = self._there(*_packed(angles, dout, qkv), *gains)
        dqkv, *dgains = _here(OPS.rope_backward(*tensors, eps))
        return [dqkv.view(dout.shape), *(None if g is None else d for g, d in zip(gains, dgains, strict=True))]

    def join_heads(self, dq, dk, dv, bias_dtype) -> tuple[Tensor, Tensor | None]:
        parts = (each.unsqueeze(0) for each in self._there(dq, dk, dv))
        dqkv, dbias = _here(OPS.join_heads(*parts, bias_dtype is not None, bias_dtype == torch.float32))
        return dqkv[0], None if bias_dtype is None else dbias

    def add_token_rows(self, table, dy, tokens) -> Tensor:
        table, dy, tokens = self._there(table.clone(), dy, tokens)
        OPS.add_token_rows_(table, dy, *tokens.sort(stable=True))
        return table.cpu()

    def dropout(self, x: Tensor, dropout: Dropout, in_place: bool = False) -> Tensor:
        if dropout.p == 0:
            pytest.skip("dropout of p=0 is x itself: no op")
        return OPS.dropout(*self._there(x), *_dropout(dropout), dropout.first_head).cpu()

    def cross_entropy(self, logits, targets, loss: Loss, want_gradient=True, padding=0) -> tuple[Tensor, Tensor]:
        whole, data = self._padded(logits, padding)
        options = loss.z_loss, loss.ignore_index, want_gradient, loss.scale
        losses = OPS.cross_entropy_(data, targets.to(DEVICE), *options)
        return losses.cpu(), _unpadded(whole, data)

    def cross_entropy_e5m2(self, logits, targets, loss: Loss, log_sum=None, padding=0) -> tuple[Tensor | None, Tensor]:
        rows, columns = logits.shape
        stride = -(-columns // 8) * 8 + padding
        data = torch.full((rows, stride), torch.nan, dtype=logits.dtype, device=DEVICE)[:, :columns].copy_(logits)
        memory = torch.full((rows, stride + 8), 0xFF, dtype=torch.uint8, device=DEVICE)
        gradient, losses = memory[:, :columns], None
        if log_sum is None:
            options = loss.z_loss, loss.ignore_index, True, loss.scale, gradient
            losses = OPS.cross_entropy_(data, targets.to(DEVICE), *options).cpu()
        else:
            options = loss.first, loss.z_loss, loss.ignore_index, loss.scale, gradient
            OPS.cross_entropy_gradient_(data, targets.to(DEVICE), log_sum.to(DEVICE), *options)
        assert torch.equal(data.cpu(), logits) or logits.isnan().any()
        assert (memory[:, columns:] == 0xFF).all()
        return losses, gradient.contiguous().view(torch.float8_e5m2).cpu()

    def cross_entropy_stats(self, logits, targets, loss: Loss, padding=0) -> Tensor:
        _, data = self._padded(logits, padding)
        return OPS.cross_entropy_stats(data, targets.to(DEVICE), loss.first, loss.ignore_index).cpu()

    def cross_entropy_gradient(self, logits, targets, log_sum, loss: Loss, padding=0) -> Tensor:
        whole, data = self._padded(logits, padding)
        options = loss.first, loss.z_loss, loss.ignore_index, loss.scale
        OPS.cross_entropy_gradient_(data, targets.to(DEVICE), log_sum.to(DEVICE), *options)
        return _unpadded(whole, data)

    def quantize_blocks(self, x, bits, mask=None) -> Tensor:
        return OPS.quantize_blocks(*self._there(x, mask), bits).cpu()

    def dequantize_blocks(self, message, blocks, bits, mask=None) -> Tensor:
        message, mask = self.having(offsets=(0,))._there(message, mask)  # an unaligned message is refused
        return OPS.dequantize_blocks(message, mask, blocks, bits).cpu()

    def quantize_fp8(self, x, amax, e5m2, both=True) -> tuple[Tensor, Tensor | None, Tensor]:
        y, transposed, scale = _here(OPS.quantize_fp8(*self._there(x), amax.to(DEVICE), e5m2, both))
        return y, transposed if both else None, scale

    def norm(self, tensors, dtype=torch.float32) -> Tensor:
        if not tensors:
            pytest.skip("torch finds the op by its tensors' device")
        return OPS.norm(self._there(*tensors)).cpu().view(())

    def adamw(
        self, states, gradients, options: Adam, scale=None, found_inf=None, dtype=torch.float32, rate=None
    ) -> list[State]:
        if not states:
            return []
        names = "parameter", "exp_avg", "exp_avg_sq", "step"
        parameters, means, squares, steps = (self._there(*(getattr(state, name) for state in states)) for name in names)
        o, numbers = options, [None if each is None else torch.tensor([each]).to(DEVICE) for each in (scale, found_inf)]
        rates = o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.adam
        copies = self._there(*(torch.empty(0) if state.copy is None else state.copy for state in states))
        given = copies if any(state.copy is not None for state in states) else None
        lr = None if rate is None else torch.tensor([rate], dtype=torch.float64).to(DEVICE)
        OPS.adamw_(parameters, self._there(*gradients), means, squares, steps, *rates, *numbers, given, lr)
        found = [State(*_here(each)) for each in zip(parameters, means, squares, steps, copies, strict=True)]
        return [
            replace(each, copy=each.copy if state.copy is not None else None)
            for each, state in zip(found, states, strict=True)
        ]

    def _there(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Copies on the device, `offsets` elements from where they would be aligned."""
        offsets = [self.offsets[i % len(self.offsets)] for i in range(len(tensors))]
        return [None if each is None else _shifted(each, offset) for each, offset in zip(tensors, offsets, strict=True)]

    def _in_place(self, op, op_, in_place: bool, x: Tensor, *arguments: object) -> Tensor:
        if not in_place:
            return op(x, *arguments).cpu()
        op_(x, *arguments)
        return x.cpu()

    def _padded(self, logits: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """Rows followed by padding of NaN, and their view without it."""
        rows, columns = logits.shape
        data = _shifted(torch.full((rows, columns + padding), torch.nan, dtype=logits.dtype), self.offsets[0])
        data[:, :columns] = logits
        return data, data[:, :columns]


def _shifted(tensor: Tensor, offset: int) -> Tensor:
    """A copy on the device; a permuted tensor stays permuted."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    dense = tensor.permute(order)
    memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    copy = memory[offset:].view(dense.shape).copy_(dense)
    return copy.permute([order.index(dim) for dim in range(tensor.dim())])


def _unpadded(whole: Tensor, data: Tensor) -> Tensor:
    """The rows, whose padding still is as it was."""
    assert whole[:, data.shape[1] :].isnan().all(), "written past a row's columns"
    return data.cpu()


def _here(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.cpu() for each in tensors]


def _noted(name: str, which: int, *arguments: object) -> list[Tensor]:
    """What an op returns, and it also with the amax of one of its results, which must be right."""
    op = getattr(OPS, f"{name.removesuffix('_backward')}_amax{'_backward' if name.endswith('_backward') else ''}")
    plain = getattr(OPS, name)(*arguments)
    results = [plain] if isinstance(plain, Tensor) else list(plain)
    *same, amax = op(*arguments)
    for a, b in zip(results, same, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    wanted = results[which].abs().amax().float() if results[which].numel() else torch.zeros_like(amax)
    assert torch.equal(amax.nan_to_num(-1), wanted.nan_to_num(-1)), f"{name}: amax {amax}, not {wanted}"
    return _here(results)


def _dropout(dropout: Dropout | None) -> tuple:
    if dropout is None:
        return 0.0, 0, None, None, 0
    site, ids = (torch.tensor(each).to(DEVICE) for each in (dropout.site, list(dropout.sample_ids)))
    return dropout.p, dropout.seed, site, ids.to(torch.int64), dropout.first_position


@pytest.fixture
def backend() -> TorchOps:
    loaded = load(DEVICE.type)
    assert isinstance(loaded, LoadedLibrary), loaded.reason
    return TorchOps()


def test_every_method_takes_what_the_other_backend_takes() -> None:
    """An argument that the adapter does not know would be one that no GPU is tested with."""
    methods = {name: method for name, method in vars(Backend).items() if isinstance(method, types.FunctionType)}
    for name, method in methods.items():
        if not name.startswith(("_", "attention", "weight_gradient")):
            ours = inspect.signature(getattr(TorchOps, name)).parameters
            assert list(ours) == list(inspect.signature(method).parameters), name


def _packed(angles, *heads) -> list[Tensor | None]:
    """Tensors [B, S, ...] of heads [tokens, ...] and, if there are any, of the angles of S tokens."""
    length = len(heads[0]) if angles[0] is None else len(angles[0])
    packed = [None if each is None else each.unflatten(0, (-1, length) if length else (1, 0)) for each in heads]
    return packed + [None if each is None else each[None, :, None, None] for each in angles]


def on_gpu(test: types.FunctionType) -> types.FunctionType:
    """The test with the best backend's cases, which are all; on a CPU, whose own tests have them too, those without
    `core` are slow."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.pytestmark = [each for mark in test.pytestmark for each in _of_best(mark)]
    return copy


def _of_best(mark: pytest.Mark) -> list[pytest.Mark]:
    """The mark without its backends."""
    names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
    if names[0] != "backend":
        return [mark]
    best = [case for case in mark.args[1] if len(names) > 1 and case.values[0] == BEST]
    cases = [
        pytest.param(*case.values[1:], id=kind, marks=ON_A_CPU_SLOW if kind == "rest" and len(best) > 1 else ())
        for case in best
        for kind in [case.id.removeprefix(f"{BEST}-")]
    ]
    return [pytest.mark.parametrize(names[1:], cases).mark] if cases else []


# Errors that a C function returns, and rows whose sum of squares overflows fp32, in which a GPU adds.
CPU_TESTS = (
    "test_wider_heads_are_refused",
    "test_rows_whose_squares_overflow",
    "test_other_numbers_of_bits_are_refused",
)
_NORMS = test_layer_norm, test_residual_norm, test_rms_norm, test_norm
_HEADS_AND_TOKENS = test_rope, test_join_heads, test_token_rows
_QUANTIZED = test_blocks, test_quantize_fp8
_OTHERS = test_bias_activation, test_dropout, test_cross_entropy, test_adamw, test_alignment
for _module in (test_softmax, *_NORMS, *_HEADS_AND_TOKENS, *_QUANTIZED, *_OTHERS):
    for _name, _test in vars(_module).items():
        own = _name.startswith("test_") and _test.__module__ == _module.__name__ and hasattr(_test, "pytestmark")
        if own and _name not in CPU_TESTS:
            globals()[f"{_name}__{_module.__name__.removeprefix('kernels.test_')}"] = on_gpu(_test)
