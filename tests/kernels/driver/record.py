"""Writes calls.xz: calls of every CPU kernel, small ones of the kernel tests, with the results in float64.

python -m kernels.driver.record, in `tests`, on a CPU with AVX512-BF16 or AMX. After a change of the kernels' header.
"""

import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gptlite.ops.philox import philox
from kernels import (
    library,
    test_adamw,
    test_attention,
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
    test_weight_gradient,
)
from kernels.cases import BF16, DTYPES, FP16, FP32
from kernels.driver.recorder import BYTES, Recorder, Recording
from kernels.memory import Memory
from kernels.options import State

CALLS = Path(__file__).parent / "calls.xz"
MODULES = (
    *(test_adamw, test_attention, test_bias_activation, test_blocks, test_cross_entropy, test_dropout),
    *(test_join_heads, test_layer_norm, test_norm, test_quantize_fp8, test_residual_norm, test_rms_norm, test_rope),
    *(test_softmax, test_token_rows, test_weight_gradient),
)
EXACT = (test_adamw, test_blocks, test_dropout, test_join_heads, test_rope)  # where `same_bits` compares with a formula
KNOWN = (  # counters, keys and words of Random123's known answers
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def softmax(backend: Recording) -> None:
    for dtype in DTYPES:
        test_softmax.test_without_a_mask(backend, (1, 1, 3, 39), dtype)
        test_softmax.test_causal(backend, (1, 7, 11), dtype)
        test_softmax.test_rows_with_nothing_left_are_zeros_with_zero_gradient(backend, dtype, 21)
    for keys in (1, 2, 3):
        test_softmax.test_without_a_mask(backend.having(offsets=(1,)), (1, 1, 1, keys), BF16)
    test_softmax.test_a_mask_of_any_dtype_broadcasts(backend, test_softmax.BROADCAST[1], torch.bool, BF16, 19)
    test_softmax.test_a_mask_of_any_dtype_broadcasts(backend, test_softmax.BROADCAST[2], FP16, FP32, 19)
    test_softmax.test_nan_and_infinity_reach_their_row_alone(backend, 40)
    test_softmax.test_values_of_all_kinds(backend, "outlier", FP32, 31)


def norms(backend: Recording) -> None:
    for width, dtype in ((45, FP32), (39, BF16), (34, FP16), (3, BF16), (1, FP16), (2, FP32)):
        test_layer_norm.test_sizes(backend, (3, width), dtype)
    test_layer_norm.test_parameters_of_another_dtype_and_no_bias(backend, BF16, FP32, 3)
    test_layer_norm.test_values_of_all_kinds(backend, "big_mean", FP32, 33)
    drop = test_residual_norm.DROP
    for width, dtype in ((37, FP32), (38, BF16), (35, FP16)):
        test_residual_norm.test_sizes(backend, (2, 2, width), dtype, drop)
        test_rms_norm.test_sizes(backend, (3, width), dtype)
        test_rms_norm.test_sizes_after_a_residual_sum(backend, (1, 2, width), dtype, None)
    test_residual_norm.test_sizes(backend, (1, 1, 19), BF16, None)


def activations(backend: Recording) -> None:
    for number, kind in enumerate(test_bias_activation.KINDS):
        for size in ((3, 37), (2, 6)):
            test_bias_activation.test_sizes(backend, size, DTYPES[number % 3], kind)
        test_bias_activation.test_sizes(backend, (2, 23), BF16, kind)


def rope_and_heads(backend: Recording) -> None:
    for size, dtype in (((2, 1, 2, 12), BF16), ((2, 2, 1, 22), FP32), ((2, 1, 1, 10), FP16)):
        for what in test_rope.WHAT:
            test_rope.test_sizes(backend, size, dtype, what)
        test_join_heads.test_sizes(backend, size, dtype)
    for dtype in DTYPES:
        test_token_rows.test_sizes(backend, 9, 11, dtype, "few")


def random(backend: Recording) -> None:
    for size, dtype in (((1, 1, 2, 39), FP32), ((2, 3, 2, 33), BF16), ((7, 2, 1, 6), FP16), ((1, 1, 1, 1), BF16)):
        test_dropout.test_sizes(backend, size, dtype)
    for name in test_dropout.NAMES:
        test_dropout.test_names(backend, name, test_dropout.IDS[5:])
    for dtype in DTYPES:
        test_dropout.test_what_is_dropped_may_be_anything(backend, dtype)
    for dtype in (BF16, FP16):
        test_dropout.test_halves_are_rounded_to_even(backend, dtype)
    test_dropout.test_values_that_round_and_overflow(backend)


def losses(backend: Recording) -> None:
    for columns, dtype in ((45, FP32), (37, BF16), (38, FP16), (3, BF16)):
        test_cross_entropy.test_sizes(backend, (3, columns), dtype, test_cross_entropy.ALL)
        logits, targets = backend.recorder.normal((3, columns), dtype), test_cross_entropy.targets_of(3, columns)
        _, gradient, _ = test_cross_entropy.reference(logits, targets, test_cross_entropy.ALL)
        log_sum = torch.logsumexp(logits.double(), -1).float()
        actual = backend.cross_entropy_gradient(logits, targets, log_sum, test_cross_entropy.ALL)
        test_cross_entropy.check_gradient(actual, gradient, logits, targets, test_cross_entropy.ALL)
    test_cross_entropy.test_cut_columns_are_the_whole(backend, 45, 3, FP16, test_cross_entropy.ALL)
    test_cross_entropy.test_values_of_all_kinds(backend, "outlier", FP32, 31)
    test_cross_entropy.test_nan_and_infinity(backend, 45)


def quantized(backend: Recording) -> None:
    for name, masked in test_blocks.MASKED:
        test_blocks.test_numbers_of_blocks(backend, 1, name, masked)
        test_blocks.test_what_is_not_finite_shows_in_its_block_alone(backend, name, masked, float("nan"))
    for e5m2 in (False, True):
        for dtype in DTYPES:
            test_quantize_fp8.test_sizes(backend, (17, 13), dtype, e5m2)


def lists(backend: Recording) -> None:
    for width, dtype in ((45, FP32), (33, BF16), (39, FP16)):
        test_norm.test_one_tensor(backend, width, dtype)
        for adam in (False, True):
            test_adamw.test_one_step(backend, width, dtype, adam)
    test_adamw.test_copies_are_rounded_to_even_and_overflow_as_casts_do(backend)
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(FP32).repeat(7)
    zeros = torch.zeros_like(nan)
    for dtype in (BF16, FP16):
        state = State(nan, zeros, zeros, torch.zeros(1), torch.zeros_like(nan, dtype=dtype))
        (after,) = backend.adamw([state], [zeros], test_adamw.OPTIONS[0])
        backend.recorder.check("copy", after.copy, nan.double(), 0.0)


def products(backend: Recording) -> None:
    for size, dtype in (((1, 1, 9, 9, 7), FP32), ((1, 1, 5, 37, 12), BF16), ((1, 1, 7, 11, 18), FP16)):
        test_attention.test_sizes(backend, size, dtype)
    test_attention.test_sizes(backend, (1, 1, 35, 35, 33), BF16)
    test_attention.test_sizes(backend, (1, 1, 18, 18, 16), FP32)
    test_attention.test_sizes(backend, (1, 1, 2, 3, 3), BF16)  # by rows
    q, k, v, dout = test_attention.inputs((1, 1, 9, 20, 8), FP32)
    test_attention.check_both(backend, q, k, v, dout, 0.3, 5)
    for size in ((35, 20, 37), (3, 33, 2), (300, 3, 5)):
        test_weight_gradient.TestWithProducts().test_sizes(backend, size)


GROUPS: tuple[Callable[[Recording], None], ...] = (
    *(softmax, norms, activations, rope_and_heads, random, losses, quantized, lists, products),
)


def record() -> Recorder:
    """All calls. Raises AssertionError where this CPU's result is not what is expected."""
    recorder = Recording.recorder = Recorder()
    cpu = library.load(library.compiled())
    backend = Recording("recording", cpu, "gptlite_cpu_")
    words(recorder)
    replaced = [(module, name) for module in MODULES for name in ("normal", "check") if hasattr(module, name)]
    replaced += [(module, "same_bits") for module in EXACT]
    before = [getattr(module, name) for module, name in replaced]
    same_fp8 = test_quantize_fp8.same_fp8

    def same_bytes(bits: Tensor, wanted: Tensor) -> None:
        same_fp8(bits, wanted)
        recorder.same_bits(bits, bits)

    try:
        test_quantize_fp8.same_fp8 = same_bytes
        for module, name in replaced:
            setattr(module, name, getattr(recorder, name))
        for group in GROUPS:
            group(backend)
    finally:
        test_quantize_fp8.same_fp8 = same_fp8
        for (module, name), value in zip(replaced, before, strict=True):
            setattr(module, name, value)
    return recorder


def words(recorder: Recorder) -> None:
    """Record calls of Philox itself, with known answers and those of gptlite/ops/philox.py."""
    drawn = torch.arange(40, dtype=torch.int64).mul(0x1234567) & 0xFFFFFFFF
    more = zip(
        *(each.tolist() for each in philox((drawn, drawn + 1, drawn * 3 & 0xFFFFFFFF, drawn), (7, 9))), strict=True
    )
    cases = [
        *KNOWN,
        *(((c, c + 1, c * 3 & 0xFFFFFFFF, c), (7, 9), w) for c, w in zip(drawn.tolist(), more, strict=True)),
    ]
    for counter, key, answer in cases:
        memory = Memory()
        out = memory.new([4], torch.int32)
        recorder.direct("philox", memory, [out, *counter, *key])
        recorder.add("words", out.tensor, BYTES, struct.pack("<4I", *answer))


def packed(recorder: Recorder) -> bytes:
    return lzma.compress(b"GPTLITE1" + b"".join(map(bytes, recorder.calls)), preset=9)


def main() -> None:
    recorder = record()
    content = packed(recorder)
    CALLS.write_bytes(content)
    elements = sum(len(call.checks) for call in recorder.calls)
    print(f"{len(recorder.calls)} calls, {elements} checks, {len(content)} bytes")
    print("checks that are not recorded:", sorted(set(recorder.unrecorded)))
    names = {bytes(call)[1 : 1 + bytes(call)[0]].decode() for call in recorder.calls if call.checks}
    print("with checks:", *sorted(names))


if __name__ == "__main__":
    main()
