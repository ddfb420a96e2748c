"""How far a kernel may be from the formula in float64.

A kernel computes in fp32 and rounds once. So, element by element, |error| <= HALF_ULP |expected| + ARITHMETIC * terms +
TINY: the first is what rounding to the output's dtype costs, the second what fp32 arithmetic does. `terms` is how large
the numbers are that were added up to the element, which each test says from its formula: where they cancel, no fp32
code can do better. A truncated instead of rounded result, or one rounded twice, is past it.
"""

import torch
from torch import Tensor

# Half the distance of two neighbours, relative: 24, 8 and 11 significant bits, the hidden one included.
HALF_ULP = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}

# What is lost near zero: half the smallest fp16 there is; bf16 and fp32 results under the smallest normal number may
# be flushed, since exp is allowed to.
TINY = {torch.float32: 1.2e-38, torch.bfloat16: 1.2e-38, torch.float16: 2**-25}

# Relative to `terms`, whatever the dtype: 16 roundings of 2^-24. Each op has fewer in a row but for its sums; those are
# made in lanes and blocks, whose roundings are random, so that they stay below it at any width.
ARITHMETIC = {
    "softmax": 1e-6,
    "softmax_backward": 2e-6,  # a dot of equal products, in a constant row, has roundings that all go one way
    "layer_norm": 1e-6,
    "residual_norm": 1e-6,
    "bias_activation": 3e-7,  # tanh, erf and exp, good to a few units in the last place
    "rope": 1e-6,
    "join_heads": 1e-6,
    "token_rows": 1e-6,
    "cross_entropy": 1e-6,
    "norm": 1e-6,  # as the header promises
    "adamw": 5e-7,
    "weight_gradient": 2e-6,
    "attention": 2e-6,  # a softmax between two dot products
}

# exp(x) is off by what its argument is: an argument of 100 has an error of 100 * 2^-24, twice (the maximum, too).
ARGUMENT = 2**-23

# bf16 attention may round the probabilities (and their gradient) to bf16 before the matmul, as matrix units take them.
ATTENTION = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def check(
    what: str, actual: Tensor, expected: Tensor, terms: Tensor | float, arithmetic: float | Tensor = 1e-6
) -> None:
    """Fails with the worst element unless all are within tolerance; expected NaN and infinities must be just those."""
    assert actual.shape == expected.shape, what
    assert expected.dtype == torch.float64, "the expected values are in float64"
    if actual.numel() == 0:
        return
    rounded = expected.to(actual.dtype)
    finite = rounded.isfinite()
    special = (actual == rounded) | (actual.isnan() & rounded.isnan())
    error = (actual.double() - expected).abs()
    limit = HALF_ULP[actual.dtype] * expected.abs() + torch.as_tensor(terms) * arithmetic + TINY[actual.dtype]
    good = torch.where(finite, error <= limit, special)
    if not bool(good.all()):
        excess = torch.where(good, 0.0, torch.nan_to_num(error / limit, nan=torch.inf))
        worst = tuple(int(i) for i in torch.unravel_index(excess.flatten().argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.numel()} elements are off, worst at {worst}: "
            f"{actual[worst].item()!r}, not {expected[worst].item()!r}, {float(excess[worst]):.3g} times the tolerance"
        )
