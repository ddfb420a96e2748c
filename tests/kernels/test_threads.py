"""The same bits on any number of threads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, CPUS, EMULATED, FP32, each, normal, on, same_bits
from kernels.library import Threads, halves, reversed_grains, uneven
from kernels.loop import loop_over
from kernels.options import Adam, Dropout, Loss
from kernels.test_adamw import state_of

DROP = Dropout(0.2, (1, 2**33))

Results = list[Tensor | None]
Op = Callable[[Backend, torch.dtype, int, int], Results]  # of about so many rows of a width


def twice(call: Callable[[bool], Tensor]) -> Tensor:
    """What a call gives, in place too."""
    beside = call(False)
    assert same_bits(call(True), beside), "in place it is another"
    return beside


def softmax(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x = normal((2, 2, min(rows, 100), width), dtype, "x")
    masks = x[:1, :1] > 1, normal((1, 1, *x.shape[2:]), dtype, "mask")
    first, second = (twice(lambda there, m=m: backend.masked_softmax_forward(x, m, 0.7, there)) for m in masks)
    causal = twice(lambda there: backend.causal_softmax_forward(x[0], 0.7, there))
    backward = twice(lambda there: backend.masked_softmax_backward(x.flatten(0, 2), first.flatten(0, 2), 0.7, there))
    return [first, second, causal, backward, backend.causal_softmax_backward(x[0], causal, 0.7)]


def layer_norm(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x, weight = normal((2 * rows, width), dtype, "x"), normal([width], dtype, "weight")
    y, mean, rstd = backend.layer_norm_forward(x, weight, weight, 1e-5)
    return [y, mean, rstd, *backend.layer_norm_backward(normal(x.shape, dtype, "dy"), x, weight, mean, rstd)]


def residual_norm(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x, weight = normal((2, rows, width), dtype, "x"), normal([width], dtype, "weight")
    y, h, mean, rstd = backend.residual_norm_forward(x, weight, x, weight, weight, 1e-5, DROP)
    dy = normal(x.shape, dtype, "dy")
    return [y, h, mean, rstd, *backend.residual_norm_backward(dy, x, h, weight, mean, rstd, DROP)]


def rms_norm(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x, weight = normal((2, rows, width), dtype, "x"), normal([width], dtype, "weight")
    y, _, rstd = backend.layer_norm_forward(x.flatten(0, 1), weight, None, 1e-5, rms=True)
    dy = normal(x.shape, dtype, "dy")
    alone = [y, *backend.layer_norm_backward(dy.flatten(0, 1), x.flatten(0, 1), weight, None, rstd, want_bias=False)]
    y, h, _, rstd = backend.residual_norm_forward(x, weight, x, None, None, 1e-5, DROP, rms=True)
    after = backend.residual_norm_backward(dy, x, h, None, None, rstd, DROP, want_beta=False)
    return [*alone, y, h, rstd, *after]


def bias_activation(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x, found = normal((2 * rows, 2 * width), dtype, "x"), []
    for kind in ("gelu_tanh", "gelu_erf", "swiglu"):
        given = x if kind == "swiglu" else x[:, :width].contiguous()
        dy, bias = normal((2 * rows, width), dtype, "dy"), normal(given.shape[1:], dtype, "bias")
        found.append(backend.bias_activation_forward(given, bias, kind))
        found += backend.bias_activation_backward(dy, given, bias, kind)
    return found


def rope(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    width = min(width // 4 * 4 + 2, 510)
    qkv, dout = (normal((rows, 1, 4, width), dtype, name) for name in ("qkv", "dout"))
    angles = normal((rows, width // 2), FP32, "cos"), normal((rows, width // 2), FP32, "sin")
    gains = normal([width], dtype, "q"), normal([width], dtype, "k")
    rotated = backend.rope_forward(qkv, angles, (None, None), None)
    normed = backend.rope_backward(dout, qkv, angles, gains, 1e-5)
    return [rotated, backend.rope_forward(qkv, angles, gains, 1e-5), *normed]


def join_heads(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    dq, dk, dv = (normal((rows, count, width), dtype, name) for count, name in ((4, "dq"), (2, "dk"), (2, "dv")))
    return [*backend.join_heads(dq, dk, dv, FP32)]


def token_rows(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    table, dy = normal((7, width), FP32, "table"), normal((5 * rows, width), dtype, "dy")
    return [backend.add_token_rows(table, dy, torch.arange(5 * rows) ** 2 % 7)]


def dropout(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    x = normal((2, 1, rows, width), dtype, "x")
    return [twice(lambda there: backend.dropout(x, DROP, there))]


def cross_entropy(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    logits, targets = normal((rows, 3 * width), dtype, "x"), torch.arange(rows) % (3 * width)
    loss = Loss(z_loss=0.01)
    stats = backend.cross_entropy_stats(logits, targets, loss)
    gradient = backend.cross_entropy_gradient(logits, targets, stats[:, 0].clone(), loss)
    return [*backend.cross_entropy(logits, targets, loss), stats, gradient]


def blocks(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    found: Results = []
    for bits, columns in ((8, 256), (4, 256), (1, 1024)):
        x = normal((rows, columns), FP32, "x")
        mask = normal((rows, columns), FP32, "mask") < 1 if bits == 1 else None
        message = backend.quantize_blocks(x, bits, mask)
        found += [message, backend.dequantize_blocks(message, rows, bits, mask)]
    return found


def norm(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    sizes = 2 * width * rows + 1, 3, 0, width * rows
    return [backend.norm([normal([size], dtype, "x") for size in sizes], dtype)]


def adamw(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    states = [state_of(size, 2) for size in (2 * width * rows + 1, 3, 0, width * rows)]
    gradients = [normal(each_.parameter.shape, dtype, "g") for each_ in states]
    after = backend.adamw(states, gradients, Adam(lr=0.1), dtype=dtype)
    return [part for each_ in after for part in (each_.parameter, each_.exp_avg, each_.exp_avg_sq, each_.step)]


def attention(backend: Backend, dtype: torch.dtype, rows: int, width: int) -> Results:
    q, k, v, dout = (normal((2, 3, 130, 32), dtype, name) for name in ("q", "k", "v", "dout"))
    out, lse = backend.attention_forward(q, k, v, 0.2)
    return [out, lse, *backend.attention_backward(dout, out, lse, q, k, v, 0.2)]


OPS = (
    softmax,
    layer_norm,
    residual_norm,
    rms_norm,
    bias_activation,
    rope,
    join_heads,
    token_rows,
    dropout,
    cross_entropy,
    blocks,
    norm,
    adamw,
    attention,
)


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: object = "") -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b), f"output {i} {where}"


@each("dtype", (FP32, BF16), (FP32,), backends=CPUS)
@loop_over("op", OPS)
def test_any_split_gives_the_same_bits(backend: Backend, dtype, op: Op) -> None:
    expected = op(backend, dtype, 400, 333)  # several tasks of CPU threads
    splits = {
        "two at once": Threads(halves, at_once=True),
        "reversed": Threads(reversed_grains),
        "uneven": Threads(uneven, at_once=True),
        "one": Threads(lambda begin, end, grain: [(begin, end)]),
    }
    for name, threads in splits.items():
        assert_same(op(backend.having(threads=threads), dtype, 400, 333), expected, name)
        assert threads.most == (1 if name == "one" else 2 if name != "reversed" else threads.most), name
    assert splits["reversed"].most > 2, "nothing ran in parallel"


@on((EMULATED,))
@loop_over("op", OPS[:-1])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(backend: Backend, op: Op) -> None:
    expected = op(backend.having(seed=0), FP32, 10, 97)
    for seed in (1, 2):
        assert_same(op(backend.having(seed=seed), FP32, 10, 97), expected, seed)
