"""Ops on lists of tensors, each in one call for all of them, as torch's own optimizers run them."""

from typing import Any

import torch

_torch: Any = torch  # the names are not in its public type stub

add_, addcmul_, copy_ = _torch._foreach_add_, _torch._foreach_addcmul_, _torch._foreach_copy_
div, div_, lerp, lerp_ = _torch._foreach_div, _torch._foreach_div_, _torch._foreach_lerp, _torch._foreach_lerp_
mul_, norm, sign_, sqrt_ = _torch._foreach_mul_, _torch._foreach_norm, _torch._foreach_sign_, _torch._foreach_sqrt_
