"""What must be the same on ARM and x86: digests of integer code, and how far the rest is from a difference.

Integers, and additions, products, quotients and roots of floats, are the same on every processor by IEEE 754;
logarithms and cosines are not. docs/arm64.md has the argument.
"""

import hashlib
import math

import numpy as np
import torch

from gptlite.data.blend import BlendPlan
from gptlite.data.order import order_key, permute
from gptlite.models.init import BLOCK, draw_normal_
from gptlite.ops.dropout import DropoutKey, keep_mask
from gptlite.ops.philox import philox


def digest(*arrays: np.ndarray | torch.Tensor) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.asarray(array).astype("<i8").tobytes())
    return content.hexdigest()[:32]


def test_random_words_and_dropout_masks() -> None:
    counter = torch.arange(10_000) * 0x9E3779B1 & 0xFFFFFFFF
    words = philox((counter, counter >> 3, counter.flip(0), counter * 0), (0xDEADBEEF, 7))
    assert digest(*words) == "9d26d0f0224cc56f0ce902535d28ad13"
    key = DropoutKey(4_000_000_007, 5, torch.tensor([3, 2**33 + 1]), 2**31 - 3, 7)
    assert digest(keep_mask(torch.Size([2, 3, 4, 501]), 0.1, key).long()) == "65583e3507d0b001d32ef088930c94da"


def test_data_order_and_blend() -> None:
    order = permute(np.arange(100_003), 100_003, order_key(1234, "train", 2))
    assert digest(order) == "c559f0432e6a892a46aeb1a5f6904d79"
    plan = BlendPlan([0.7, 1 / 3, 0.1, 1e-3])
    assert digest(*plan.assign(5, 1234, 77), plan.before(123_456_789)) == "10a2b144affca3cdee157f6683d07325"


def test_initial_values_are_far_from_another_rounding() -> None:
    """Logarithms, roots and cosines in fp64 may differ by some units in the last place between C libraries. With each
    value off by four units either way, no fp32 value of a million changes; about one in 10^8 must."""
    counter = torch.arange(BLOCK // 4)
    bits = philox((counter, counter * 0, counter * 0, counter * 0), _key("w"))
    assert digest(*bits) == "8aa71bb6dab1d8155d8208eea822c674"
    u0, u1, u2, u3 = ((word.double() + 0.5) / 2**32 for word in bits)  # exact in fp64
    pairs = []
    for radius, angle in ((u0, u1), (u2, u3)):
        r, a = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        pairs += [r * a.cos(), r * a.sin()]
    normal = torch.stack(pairs, dim=1).flatten()
    drawn = torch.empty(BLOCK)
    draw_normal_(drawn, 0.02, 0, "w")
    assert torch.equal(drawn, (normal * 0.02).float())
    for factor in (1 - 4 * 2**-53, 1 + 4 * 2**-52):
        assert torch.equal((normal * factor * 0.02).float(), drawn)


def _key(name: str) -> tuple[int, int]:
    words = hashlib.sha256(f"0/{name}".encode()).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:8], "little")
