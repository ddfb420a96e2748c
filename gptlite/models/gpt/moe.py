"""Mixture of experts in place of a block's MLP."""

from torch import Tensor, nn

from gptlite.models.experts import Experts, Router
from gptlite.models.gpt.config import GPTConfig, Score
from gptlite.models.gpt.mlp import MLP
from gptlite.ops.select import Ops


class MoE(nn.Module):
    """Experts chosen by a router, plus the shared experts, which form one dense MLP: x [B, S, d] -> [B, S, d]. There
    are no biases."""

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        moe, width = config.moe, config.expert_size
        how = {"sigmoid": moe.score is Score.sigmoid, "renormalize": moe.renormalize, "bias_rate": moe.bias_rate}
        self.router = Router(config.d_model, moe.experts, moe.top_k, **how)
        self.router.sequence_loss, self.router.z_loss = moe.sequence_loss, moe.z_loss
        sizes = moe.experts, config.d_model, config.up_width(width), width
        self.experts = Experts(*sizes, config.mlp.value, fused=ops.activation)
        self.shared = MLP(config, ops, width=moe.shared * width, bias=False) if moe.shared else None

    def forward(self, x: Tensor, *, sample_ids: Tensor | None = None, bias: bool = True) -> Tensor:
        """Return the sum of the experts' outputs. The router does not count fillers among `sample_ids`. `bias` is
        ignored."""
        return self.experts(x, *self.router(x, sample_ids), self.shared)

    def local_bias(self) -> Tensor | None:
        """Return None, since there are no biases."""
        return None
