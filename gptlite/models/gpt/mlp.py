"""Position-wise MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.models.gpt.config import GPTConfig, MLPKind
from gptlite.models.layers import Linear
from gptlite.ops.bias_gelu import bias_gelu
from gptlite.ops.select import Ops

GELUS = {MLPKind.gelu_tanh: "tanh", MLPKind.gelu_erf: "none"}


class MLP(nn.Module):
    """MLP with a hidden layer of width d_ff: x [B, S, d] -> [B, S, d].

    Rows 2i and 2i + 1 of a gated `up` are the gate and the value of hidden unit i, so that a tensor-parallel shard of
    whole units is one contiguous block of rows.
    """

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.fused_gelu, self.kind = ops.bias_gelu, config.mlp
        self.up = Linear(config.d_model, config.up_size, bias=config.bias, fused=ops.linear)
        self.down = Linear(config.ffn_size, config.d_model, bias=config.bias, fused=ops.linear)

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Return the MLP's output. Without `bias` the bias of the last layer is left to the next op."""
        hidden = self._hidden(x)
        return self.down(hidden) if bias else self.down.project(hidden)

    def _hidden(self, x: Tensor) -> Tensor:
        if self.kind in GELUS:
            # Back to the activations' dtype: under Apex's O1 the product has another one.
            projected, bias = self.up.project(x).to(x.dtype), self.up.local_bias(x.dtype)
            return bias_gelu(projected, bias, GELUS[self.kind], self.fused_gelu)
        projected = self.up(x)
        if self.kind.gated:
            gate, value = projected.unflatten(-1, (-1, 2)).unbind(-1)
            return (F.silu(gate) if self.kind is MLPKind.swiglu else F.gelu(gate)) * value
        hidden = F.relu(projected)
        return hidden.square() if self.kind is MLPKind.relu2 else hidden
