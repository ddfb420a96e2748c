"""torch's pipeline stage."""

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class Stage(PipelineStage):
    """torch's stage, which sends nothing to its own rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # In a V schedule torch 2.11 lets the last rank send to itself at the start, which gloo does not support. torch
        # 2.15 has no such method.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]
