"""Gathers of FSDP2's parameters in quantized blocks (qwZ of ZeRO++), and from a copy inside the node (hpZ)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.parallelism.point_to_point import PairwiseAllGather
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.zeropp.nodes import Nodes
from gptlite.torch_private.distributed import all_gather_single
from gptlite.torch_private.fsdp_shards import Group


class Gather:
    """All-gather of a bucket over `dp_shard`, in FSDP2's interface.

    With a `codec`, ranks send blocks of it. All ranks decode the same messages, of their own shards too, so all of them
    compute with the same bits, which the shards themselves do not have.

    `secondary`: each rank keeps its part of what the forward pass has gathered, one of the node's equal parts, in the
    dtype that it computes in. The backward pass gathers these inside the node, and has the weights of the forward pass.
    FSDP2 has such copies too (an integer as `reshard_after_forward`), but not of parameters sharded over tensor ranks.
    """

    def __init__(self, group: Group, codec: Codec | None, nodes: Nodes, secondary: bool) -> None:
        self.group, self.codec, self._nodes = group, codec, nodes
        self._secondary = secondary and group.frees  # others are not gathered again
        self.copy: Tensor | None = None

    @property
    def refetches(self) -> bool:
        """True if the backward pass gathers over `dp_shard` again."""
        return self.group.frees and not self._secondary

    @property
    def keeps(self) -> bool:
        """True if there is a copy in the node."""
        return self._secondary

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts = output_tensor.view(self._nodes.size, -1)
        place = group.rank() % self._nodes.size
        if self._secondary and self.copy is not None and self.group.in_backward:
            if self._nodes.inside is None:
                output_tensor.copy_(self.copy)
            else:
                _gather(output_tensor, self.copy, self._nodes.inside)
            return
        if self.codec is None:
            self._over_nodes(output_tensor, input_tensor, group)
        else:
            self._quantized(self.codec, output_tensor, input_tensor, group)
        if self._secondary and self.copy is None:
            self.copy = parts[place].clone()
        elif self.copy is not None:
            self.copy.copy_(parts[place])

    def _quantized(self, codec: Codec, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        if not shard.is_floating_point():
            raise RuntimeError(f"parallelism.zeropp.weights={codec.name}: parameters of several dtypes in a bucket")
        layout = BlockLayout(tuple(self.group.sizes), codec.width)
        message = codec.encode(layout.pack(shard)[0])
        messages = message.new_empty(group.size() * message.numel())
        self._over_nodes(messages, message, group)
        for part, received in zip(output.view(group.size(), -1), messages.view(group.size(), -1), strict=True):
            part.copy_(layout.unpack(codec.decode(received, layout.blocks)[None])[0])

    def _over_nodes(self, output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the ranks' parts [n] into [ranks * n]. With gloo, a part goes to another node once, to the rank that
        has the same place there, and then on inside the node; NCCL chooses such ways itself."""
        nodes = self._nodes
        if nodes.inside is None or nodes.across is None or output.device.type != "cpu":
            _gather(output, part, group)
            return
        column = part.new_empty(nodes.count * part.numel())
        _gather(column, part, nodes.across)
        table = torch.empty_like(output)
        _gather(table, column, nodes.inside)
        by_place = table.view(nodes.size, nodes.count, part.numel())
        output.view(nodes.count, nodes.size, part.numel()).copy_(by_place.transpose(0, 1))


def _gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the ranks' parts [n] into [ranks * n]."""
    if output.device.type == "cpu":  # gloo's own is slower
        PairwiseAllGather()(output, part, group)
    else:
        all_gather_single(output, part, group=group)
