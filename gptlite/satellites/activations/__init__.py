"""Offload of activations to host memory: a plug-in that comes with gptlite. Does not import torch."""

from gptlite.parallelism.config import ACTIVATION_OFFLOADS

MODULE = "gptlite.satellites.activations.offload"
if MODULE not in ACTIVATION_OFFLOADS:
    ACTIVATION_OFFLOADS.append(MODULE)
