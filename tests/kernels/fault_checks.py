"""Of the kernel tests, what takes a second for each op: run on kernels with a planted fault, it must fail."""

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import replace

import torch

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
    test_threads,
    test_token_rows,
)
from kernels.cases import BF16, FP16, FP32, normal
from kernels.emulator import READ_ONLY, WRITABLE, Device, Emulated
from kernels.library import GptliteLoss, signatures
from kernels.options import Dropout, Loss

_MAP_NORESERVE = 0x4000  # Python 3.13's mmap.MAP_NORESERVE, on Linux

# Of each op the files that it needs.
SOURCES = {
    "softmax": ("softmax.cu",),
    "layer_norm": ("layer_norm.cu", "column_sums.cu"),
    "residual_norm": ("residual_norm.cu", "residual_norm_backward.cu", "column_sums.cu"),
    "rms_norm": ("layer_norm.cu", "residual_norm.cu", "residual_norm_backward.cu", "column_sums.cu"),
    "bias_activation": ("bias_activation.cu", "column_sums.cu"),
    "rope": ("rope.cu", "column_sums.cu"),
    "join_heads": ("join_heads.cu", "column_sums.cu"),
    "token_rows": ("token_rows.cu",),
    "dropout": ("dropout.cu",),
    "cross_entropy": ("cross_entropy.cu",),
    "blocks": ("blocks.cu",),
    "quantize_fp8": ("quantize_fp8.cu",),
    "norm": ("norm.cu",),
    "adamw": ("adamw.cu",),
}

# In packs and singly: rows of a part of a warp, of a warp, of several, and too long to be held.
WIDTHS = ((33, FP32), (64, BF16), (777, FP16), (1024, BF16), (1000, FP32), (2048, FP32), (8208, BF16), (8193, FP32))


def softmax(backend: Emulated) -> None:
    for width, dtype in WIDTHS:
        test_softmax.test_without_a_mask(backend, (2, 3, 5, 33) if width == 33 else (1, 1, 2, width), dtype)
    for i, mask_dtype, dtype, keys in ((1, torch.bool, FP32, 19), (3, BF16, FP32, 260), (0, FP16, BF16, 64)):
        whole = test_softmax.BROADCAST[i]
        test_softmax.test_a_mask_of_any_dtype_broadcasts(backend, whole, mask_dtype, dtype, keys)
    for keys in (45, 1100):
        test_softmax.test_rows_with_nothing_left_are_zeros_with_zero_gradient(backend, BF16, keys)
    for size, dtype in (((2, 33, 33), FP32), ((2, 5, 40), BF16), ((1, 40, 5), FP32), ((1, 3, 9000), BF16)):
        test_softmax.test_causal(backend, size, dtype)
    test_softmax.test_without_a_mask(backend.having(offsets=(1,)), (1, 1, 2, 64), FP32)


def layer_norm(backend: Emulated) -> None:
    for width, dtype in WIDTHS:
        rows = 40 if width < 100 else 15 if width == 1000 else 2
        test_layer_norm.test_sizes(backend, (rows, width), dtype)
    test_layer_norm.test_parameters_of_another_dtype_and_no_bias(backend, BF16, FP32, 96)
    test_layer_norm.test_parameters_of_another_dtype_and_no_bias(backend, FP32, BF16, 3)
    test_layer_norm.test_values_of_all_kinds(backend, "big_mean", FP32, 5000)
    test_layer_norm.test_eps(backend, 0.1)
    test_layer_norm.test_sizes(backend, (300, 4), FP32)
    for rows, width in ((200, 768), (40, 2048)):  # a warp, and several, with a row after another
        test_layer_norm.test_sizes(backend, (rows, width), BF16)
    test_layer_norm.test_sizes(backend.having(offsets=(1,)), (3, 64), FP32)


def residual_norm(backend: Emulated) -> None:
    drop = test_residual_norm.DROP
    for width, dtype in ((33, FP32), (64, BF16), (1024, BF16), (8208, BF16), (8193, FP32)):
        test_residual_norm.test_sizes(backend, (2, 2 if width > 100 else 9, width), dtype, drop)
    test_residual_norm.test_sizes(backend, (3, 100, 5), FP32, drop)  # more rows than blocks
    test_residual_norm.test_sizes(backend, (2, 40, 768), BF16, None)
    test_residual_norm.test_parameters_of_another_dtype_and_null_arguments(backend, BF16, FP32, drop, 96)
    test_residual_norm.test_parameters_of_another_dtype_and_null_arguments(backend, FP32, BF16, None, 3)


def rms_norm(backend: Emulated) -> None:
    for size, dtype in (((3, 33), FP32), ((70, 17), BF16), ((1, 8193), BF16), ((1, 8208), BF16)):
        test_rms_norm.test_sizes(backend, size, dtype)
    test_rms_norm.test_parameters_of_another_dtype_or_none(backend, BF16, FP32, None, 96)
    test_rms_norm.test_more_rows_than_a_gpu_holds_at_once(backend, 768, BF16, None)
    test_rms_norm.test_sizes_after_a_residual_sum(backend, (1, 2, 8193), FP32, None)


def bias_activation(backend: Emulated) -> None:
    for size, dtype in (((3, 33), FP32), ((70, 16), BF16), ((132, 257), FP16), ((2, 2056), FP32), ((1, 8193), BF16)):
        for kind in ("gelu_tanh", "gelu_erf"):
            test_bias_activation.test_sizes(backend, size, dtype, kind)
    for kind in ("gelu_tanh", "gelu_erf", "relu2", "swiglu"):
        test_bias_activation.test_all_arguments(backend, FP32, kind)
        test_bias_activation.test_large_arguments(backend, FP32, kind)
    for kind, size, dtype in (("swiglu", (132, 36), BF16), ("geglu", (70, 17), FP16), ("relu", (3, 33), FP32)):
        test_bias_activation.test_sizes(backend, size, dtype, kind)
        test_bias_activation.test_nan_reaches_its_unit_alone(backend, kind)
    for kind in ("gelu_tanh", "swiglu"):
        test_bias_activation.test_sizes(backend.having(offsets=(1,)), (3, 64), FP32, kind)


def rope(backend: Emulated) -> None:
    for size, dtype in (((3, 2, 3, 64), BF16), ((5, 1, 1, 66), FP32), ((2, 1, 2, 80), FP16), ((70, 1, 1, 16), FP32)):
        for what in test_rope.WHAT:
            test_rope.test_sizes(backend, size, dtype, what)
    test_rope.test_norms_of_any_width(backend, 33, BF16)
    test_rope.test_gains_of_fp32_and_a_single_gain(backend, BF16)
    test_rope.test_heads_do_not_touch_each_other(backend, FP32)
    test_rope.test_sizes(backend.having(offsets=(1,)), (3, 1, 2, 64), BF16, "both")


def join_heads(backend: Emulated) -> None:
    for i, size in enumerate(test_join_heads.CORE):
        test_join_heads.test_sizes(backend, size, (FP32, BF16, FP16)[i % 3])
    test_join_heads.test_a_bias_of_16_bits_or_none(backend, BF16)
    test_join_heads.test_sizes(backend.having(offsets=(1,)), (3, 1, 2, 64), BF16)


def token_rows(backend: Emulated) -> None:
    for rows, width, dtype, kind in ((300, 8, BF16, "few"), (33, 264, FP32, "many"), (70, 33, BF16, "one")):
        test_token_rows.test_sizes(backend, rows, width, dtype, kind)
    test_token_rows.test_sizes(backend.having(offsets=(1,)), 9, 64, BF16, "few")


def dropout(backend: Emulated) -> None:
    for size, dtype in (((2, 3, 2, 33), FP32), ((7, 2, 1, 8), BF16), ((1, 1, 2, 8208), FP16)):
        test_dropout.test_sizes(backend, size, dtype)
    for name in test_dropout.NAMES[1:4]:
        test_dropout.test_names(backend, name, test_dropout.IDS[3:6])
    test_dropout.test_the_threshold_itself_is_kept(backend)
    x, name = normal((2, 1, 3, 64), FP32, "x"), Dropout(0.4, (0, 1))
    for offsets in ((1,), (0, 1)):
        assert torch.equal(backend.having(offsets=offsets).dropout(x, name), test_dropout.expected(x, name))


def cross_entropy(backend: Emulated) -> None:
    test_cross_entropy.test_sizes(backend, (7, 33), FP32, test_cross_entropy.ALL)
    test_cross_entropy.test_sizes(backend, (7, 777), BF16, test_cross_entropy.ALL)
    test_cross_entropy.test_sizes(backend, (2, 9000), FP32, test_cross_entropy.PLAIN)
    test_cross_entropy.test_options_and_padded_rows(backend, test_cross_entropy.LOSSES[1], FP32, 1000, 1)
    test_cross_entropy.test_cut_columns_are_the_whole(backend, 1000, 3, FP16, test_cross_entropy.ALL)
    test_cross_entropy.test_the_gradient_in_e5m2(backend, 777, test_cross_entropy.ALL, 2.0**15, 24)
    test_cross_entropy.test_a_target_of_no_column_harms_no_other_row(backend)
    test_cross_entropy.test_values_of_all_kinds(backend, "big_mean", FP32, 5000)
    rows_far_apart(backend)


def rows_far_apart(backend: Emulated) -> None:
    """Cross entropy of rows that are 3 GB apart in memory that is not there in between."""
    rows, columns, stride = 3, 40, 1_500_000_001
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, ((rows - 1) * stride + columns) * 2, flags=flags)
    data = torch.frombuffer(memory, dtype=BF16)
    logits, targets, losses = normal((rows, columns), BF16, "far"), torch.tensor([0, 7, 39]), torch.zeros(rows)
    device = Device(backend.library)
    device.reset(backend.seed)
    for row in range(rows):
        data[row * stride : row * stride + columns] = logits[row]
        device.lend(data.data_ptr() + row * stride * 2, columns * 2, WRITABLE)
    device.lend(targets.data_ptr(), rows * 8, READ_ONLY)
    device.lend(losses.data_ptr(), rows * 4, WRITABLE)
    function = backend.library.gptlite_cuda_cross_entropy
    function.argtypes = [*signatures()["cross_entropy"], ctypes.c_void_p]
    struct = GptliteLoss(-100, 0, 0.0, 1.0)
    arguments = losses.data_ptr(), data.data_ptr(), stride, targets.data_ptr(), rows, columns, ctypes.byref(struct)
    status = function(*arguments, 1, 1, None)
    device.check()
    assert status == 0
    expected, gradient, _ = test_cross_entropy.reference(logits, targets, Loss())
    assert torch.allclose(losses.double(), expected, atol=1e-5)
    actual = torch.stack([data[row * stride : row * stride + columns] for row in range(rows)])
    test_cross_entropy.check_gradient(actual, gradient, logits, targets, Loss())


def blocks(backend: Emulated) -> None:
    for name, masked in test_blocks.MASKED:
        for count in (1, 6):
            test_blocks.test_numbers_of_blocks(backend, count, name, masked)
        for size in (1e-45, 1.4e-44, 2.6e-43):
            test_blocks.test_subnormal_and_large_values(backend, name, masked, size)
        for value in (float("nan"), float("inf"), -float("inf")):
            test_blocks.test_what_is_not_finite_shows_in_its_block_alone(backend, name, masked, value)
        test_blocks.test_values_that_are_not_aligned(backend, name, masked)
    for name in ("int8", "int4"):
        test_blocks.test_halves_are_rounded_to_even(backend, name)


def quantize_fp8(backend: Emulated) -> None:
    for size in test_quantize_fp8.CORE:
        test_quantize_fp8.test_sizes(backend, size, BF16, e5m2=size[0] == 48)
    test_quantize_fp8.test_every_number_of_16_bits(backend, 0.013, e5m2=False)
    for value in (float("nan"), float("inf")):
        test_quantize_fp8.test_what_is_not_finite(backend, value, e5m2=True)
    test_quantize_fp8.test_one_layout_zeros_and_alignment(backend, FP32, 1)


def norm(backend: Emulated) -> None:
    for width, dtype in ((1, FP32), (33, BF16), (5000, FP32)):
        test_norm.test_one_tensor(backend, width, dtype)
    test_norm.check_norm(backend, [normal([70_000], BF16, "x")], BF16)
    test_norm.test_many_tensors_of_all_sizes(backend, FP32)
    test_alignment.test_any_alignment_gives_the_same_bits(backend, FP16, 65, (3, 0, 2, 1), test_threads.norm)
    test_norm.check_norm(backend.having(offsets=(1, 3)), [normal([n], BF16, n) for n in (3, 64, 333)], BF16)


def adamw(backend: Emulated) -> None:
    for size, dtype in ((1, FP32), (33, BF16), (2048, FP16)):
        for adam in (False, True):
            test_adamw.test_one_step(backend, size, dtype, adam)
    before, gradient = test_adamw.state_of(16_400, 3), normal([16_400], FP32, "g")
    (after,) = backend.adamw([before], [gradient], test_adamw.OPTIONS[3], 0.5)
    test_adamw.check_step(before, after, gradient, test_adamw.OPTIONS[3], 0.5)
    test_adamw.test_nothing_changes_where_an_infinity_was_found(backend, 1.0)
    test_adamw.test_hundreds_of_tiny_tensors(backend, BF16)
    test_adamw.test_copies_are_what_the_parameters_are_rounded_to(backend, 33, BF16, False)
    test_adamw.test_one_step(replace(backend, offsets=(1, 0)), 64, FP32, False)


CHECKS: dict[str, Callable[[Emulated], None]] = {
    each.__name__: each
    for each in (
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
        quantize_fp8,
        norm,
        adamw,
    )
}
