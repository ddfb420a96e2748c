"""Model state in files (ZeRO-Infinity, arXiv:2104.07857): a plug-in that comes with gptlite. Does not import torch."""

from typing import TYPE_CHECKING

from gptlite.parallelism.in_files import register_state_files

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.mesh import Mesh


def _keep(optimizer: "Optimizer", config: "ParallelismConfig", mesh: "Mesh") -> "Optimizer":
    from gptlite.satellites.nvme.streamed import offload_state

    return offload_state(optimizer, config, mesh)


register_state_files(_keep)
