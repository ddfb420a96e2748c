"""Line on compressed gradients that follows the banner of a run."""

from gptlite.parallelism.config import Compression, ParallelismConfig
from gptlite.parallelism.mesh import Mesh


def compression_words(config: ParallelismConfig, mesh: Mesh, micro_batches: int) -> str:
    """Return what a rank sends with `parallelism.compression`; an empty string without it."""
    if config.compression is Compression.none:
        return ""
    from gptlite.satellites.compressed.gradients import CompressedReduction  # not in other runs

    if not isinstance(mesh.reduction, CompressedReduction):
        return (
            f"none, although parallelism.compression={config.compression.value}: a single data rank sends no gradients"
        )
    return mesh.reduction.words(micro_batches if config.zero >= 2 else 1)
