"""Position-wise MLP."""

from torch import Tensor, nn

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.layers import Linear
from gptlite.ops.bias_activation import bias_activation
from gptlite.ops.linear import cast
from gptlite.ops.select import Ops


class MLP(nn.Module):
    """MLP with a hidden layer of `width` units: x [B, S, d] -> [B, S, d].

    Rows 2i and 2i + 1 of a gated `up` are the gate and the value of hidden unit i, so that a tensor-parallel shard of
    whole units is one contiguous block of rows. `notes_amax`: our kernel notes the amax of its results, for fp8.
    """

    notes_amax = False

    def __init__(self, config: GPTConfig, ops: Ops, *, width: int, bias: bool) -> None:
        super().__init__()
        self.kind, self.fused = config.mlp.value, ops.activation
        self.up = Linear(config.d_model, config.up_width(width), bias=bias, fused=ops.linear)
        self.down = Linear(width, config.d_model, bias=bias, fused=ops.linear)

    def forward(self, x: Tensor, *, sample_ids: Tensor | None = None, bias: bool = True) -> Tensor:
        """Return the MLP's output, for any samples. If `bias` is False, the next op adds the last layer's bias."""
        # Cast back to the activations' dtype: with Apex's O1, the projection's output has another dtype.
        projected = self.up.project(x).to(x.dtype)
        hidden = bias_activation(projected, cast(self.up.local_bias(), x.dtype), self.kind, self.fused, self.notes_amax)
        return self.down(hidden) if bias else self.down.project(hidden)

    def local_bias(self) -> Tensor | None:
        """Return the last layer's bias; None without a bias."""
        return self.down.bias
