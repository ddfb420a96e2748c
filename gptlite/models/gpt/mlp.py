"""Position-wise MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.models.gpt.config import Activation, GPTConfig
from gptlite.models.layers import Linear
from gptlite.ops.bias_gelu import bias_gelu
from gptlite.ops.select import Ops


class MLP(nn.Module):
    """MLP with a hidden layer of width d_ff: x [B, S, d] -> [B, S, d]."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.fused_gelu = ops.bias_gelu
        self.activation = config.activation
        self.up = Linear(config.d_model, config.ffn_size, bias=config.bias, fused=ops.linear)
        self.down = Linear(config.ffn_size, config.d_model, bias=config.bias, fused=ops.linear)

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Return the MLP's output. Without `bias` the bias of the last layer is left to the next op."""
        hidden = self._hidden(x)
        return self.down(hidden) if bias else self.down.project(hidden)

    def _hidden(self, x: Tensor) -> Tensor:
        if self.activation is Activation.relu:
            return F.relu(self.up(x))
        approximate = "tanh" if self.activation is Activation.gelu_tanh else "none"
        # Back to the activations' dtype: under Apex's O1 the product has another one.
        projected, bias = self.up.project(x).to(x.dtype), self.up.local_bias(x.dtype)
        return bias_gelu(projected, bias, approximate, self.fused_gelu)
