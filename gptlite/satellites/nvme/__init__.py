"""Model state in files (ZeRO-Infinity, arXiv:2104.07857): a plug-in that comes with gptlite. Does not import torch."""

from typing import TYPE_CHECKING, Any

from gptlite.parallelism.in_files import FileKeeper, register_files

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _place(*arguments: Any) -> object:
    from gptlite.satellites.nvme.infinite import place_parameters

    return place_parameters(*arguments)


def _keep(*arguments: Any) -> "Optimizer":
    from gptlite.satellites.nvme.infinite import offload_state

    return offload_state(*arguments)


register_files(FileKeeper(_place, _keep))
