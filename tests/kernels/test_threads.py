"""The same bits on any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, CPU_BACKENDS, EMULATED, FP32, each, normal, on, same_bits
from kernels.library import Threads, halves, reversed_grains, uneven
from kernels.options import Adam, Dropout, Loss
from kernels.test_adamw import state_of

DROP = Dropout(0.2, (1, 2**33))


def rows(backend: Backend) -> int:
    """Enough for several tasks of CPU threads, or for several blocks."""
    return 751 if backend.is_cpu else 10


Op = Callable[[Backend, torch.dtype], list[Tensor | None]]


def softmax(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    x = normal((2, 2, 100 if backend.is_cpu else 5, 333), dtype, "x")
    masked, causal = backend.masked_softmax_forward(x, x[:1, :1] > 1, 1.0), backend.causal_softmax_forward(x[0], 1.0)
    flat = x.flatten(0, 2)
    backward = backend.masked_softmax_backward(flat, masked.flatten(0, 2), 1.0)
    return [masked, causal, backward, backend.causal_softmax_backward(x[0], causal, 1.0)]


def layer_norm(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    x, weight = normal((2 * rows(backend), 97), dtype, "x"), normal([97], dtype, "weight")
    y, mean, rstd = backend.layer_norm_forward(x, weight, weight, 1e-5)
    return [y, mean, rstd, *backend.layer_norm_backward(normal(x.shape, dtype, "dy"), x, weight, mean, rstd)]


def residual_norm(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    x, weight = normal((2, rows(backend), 97), dtype, "x"), normal([97], dtype, "weight")
    y, h, mean, rstd = backend.residual_norm_forward(x, weight, x, weight, weight, 1e-5, DROP)
    dy = normal(x.shape, dtype, "dy")
    return [y, h, mean, rstd, *backend.residual_norm_backward(dy, x, h, weight, mean, rstd, DROP)]


def bias_gelu(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    x, bias = normal((2 * rows(backend), 97), dtype, "x"), normal([97], dtype, "bias")
    dy = normal(x.shape, dtype, "dy")
    return [backend.bias_gelu_forward(x, bias, True), *backend.bias_gelu_backward(dy, x, bias, False)]


def dropout(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    return [backend.dropout(normal((2, 1, rows(backend), 97), dtype, "x"), DROP)]


def cross_entropy(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    logits, targets = normal((rows(backend), 301), dtype, "x"), torch.arange(rows(backend)) % 301
    loss = Loss(label_smoothing=0.1, z_loss=0.01, vocab_size=301)
    stats = backend.cross_entropy_stats(logits, targets, loss)
    gradient = backend.cross_entropy_gradient(logits, targets, stats[:, 0].clone(), loss)
    return [*backend.cross_entropy(logits, targets, loss), stats, gradient]


def norm(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    return [
        backend.norm(
            [normal([size], dtype, "x") for size in (200 * rows(backend) + 1, 3, 0, 100 * rows(backend))], dtype
        )
    ]


def adamw(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    states = [state_of(size, 2) for size in (200 * rows(backend) + 1, 3, 0, 100 * rows(backend))]
    after = backend.adamw(states, [normal(each_.parameter.shape, dtype, "g") for each_ in states], Adam(), dtype=dtype)
    return [part for each_ in after for part in (each_.parameter, each_.exp_avg, each_.exp_avg_sq, each_.step)]


def attention(backend: Backend, dtype: torch.dtype) -> list[Tensor | None]:
    q, k, v, dout = (normal((2, 3, 130, 32), dtype, name) for name in ("q", "k", "v", "dout"))
    out, lse = backend.attention_forward(q, k, v, 0.2)
    return [out, lse, *backend.attention_backward(dout, out, lse, q, k, v, 0.2)]


OPS = (softmax, layer_norm, residual_norm, bias_gelu, dropout, cross_entropy, norm, adamw, attention)


@each("dtype", (FP32, BF16), (FP32,), backends=CPU_BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_any_split_gives_the_same_bits(backend: Backend, dtype, op: Op) -> None:
    expected = op(backend, dtype)
    splits = {
        "two at once": Threads(halves, at_once=True),
        "reversed": Threads(reversed_grains),
        "uneven": Threads(uneven, at_once=True),
        "one": Threads(lambda begin, end, grain: [(begin, end)]),
    }
    for name, threads in splits.items():
        actual = op(backend.having(threads=threads), dtype)
        assert len(actual) == len(expected)
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert (a is None) == (b is None)
            assert a is None or same_bits(a, b), f"output {i}, {name}"
        assert threads.most == (1 if name == "one" else 2 if name != "reversed" else threads.most), name
    assert splits["reversed"].most > 2, "nothing ran in parallel"


@on((EMULATED,))
@pytest.mark.parametrize("op", OPS[:-1])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(backend: Backend, op: Op) -> None:
    expected = op(backend.having(seed=0), FP32)
    for seed in (1, 2):
        for a, b in zip(op(backend.having(seed=seed), FP32), expected, strict=True):
            assert a is None or same_bits(a, b)
