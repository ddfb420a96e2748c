#!/bin/sh
# torch 2.15.0: FSDPModule.finalize_backward leaves gradients unreduced, without an error, if a weight-gradient pass
# follows another one.
#
# A pipeline with zero bubbles splits backward passes: the input's gradient is computed first, and the weights' gradients
# later, from inside the graph, so that none of FSDP2's hooks runs. With set_manual_backward_finalization(True), the
# caller reduces gradients with finalize_backward. After input, weight, input, weight, all gradients are reduced. After
# input, input, weight, weight, the second call does nothing: it reduces a group only if one of the group's backward
# hooks has run since the last call. The sharded gradient then lacks the second pass.
# Installs a build of torch of 3 GB; runs on a CPU. Seen with Python 3.11 on 2026-11-28.
# Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PIP_CONFIG_FILE=/dev/null "$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.15.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Block(nn.Module):
    """A product and a residual sum, as at the end of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.product(x)


def gradient(order: str) -> torch.Tensor:
    """The sharded weight's gradient after input (I) and weight (W) halves of two backward passes."""
    torch.manual_seed(0)
    layer = Block()
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    layer.set_manual_backward_finalization(True)
    inputs = [torch.full((1, 2), float(number), requires_grad=True) for number in (1, 2)]
    outputs = [layer(x) for x in inputs]
    waiting_i, waiting_w = list(range(2)), list(range(2))
    for half in order:
        layer.unshard()
        layer.set_requires_gradient_sync(False)
        layer.set_reshard_after_backward(False)
        if half == "I":
            number = waiting_i.pop(0)
            torch.autograd.grad(outputs[number].sum(), inputs[number], retain_graph=True)
            continue
        # The weight's gradient, added to .grad as torch.distributed.pipelining's stage_backward_weight does.
        number = waiting_w.pop(0)
        edge = GradientEdge(layer.product.weight.view_as(layer.product.weight).grad_fn.next_functions[0][0], 0)
        product = outputs[number].grad_fn.next_functions[1][0]  # where the input's half has stopped
        (found,) = torch.autograd.grad(GradientEdge(product, 0), edge, torch.ones(1, 2), retain_graph=True)
        layer.product.weight.grad = found if layer.product.weight.grad is None else layer.product.weight.grad + found
        layer.set_requires_gradient_sync(True)
        layer.finalize_backward()
    layer.reshard()
    return layer.product.weight.grad.to_local()


for order, expected in (("IWIW", 3.0), ("IIWW", 1.0)):
    found = gradient(order)
    print(f"{order}: a gradient of {found[0, 0]:g}, where the two passes sum to 3")
    if not torch.equal(found, torch.full((2, 2), expected)):
        raise SystemExit(f"changed: {found}")
PYTHON
