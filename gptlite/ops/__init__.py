"""One public function per op: a reference now, a fused path where there is one."""

from gptlite.ops.attention import causal_attention
from gptlite.ops.bias_gelu import bias_gelu
from gptlite.ops.cross_entropy import linear_cross_entropy
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.layer_norm import layer_norm
from gptlite.ops.select import Ops, select_ops

__all__ = [
    "DropoutKey",
    "Ops",
    "bias_gelu",
    "causal_attention",
    "dropout",
    "layer_norm",
    "linear_cross_entropy",
    "select_ops",
]
