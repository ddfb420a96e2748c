"""Line on the exchange of momenta that follows the banner of a run."""

from gptlite.optimizer.config import OptimizerConfig
from gptlite.optimizer.registry import optimizer_name
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import format_bytes
from gptlite.satellites.onebit.configs import OneBitAdamConfig, OneBitLambConfig, ZeroOneAdamConfig


def onebit_words(config: OptimizerConfig, mesh: Mesh) -> str:
    """Return in which steps ranks exchange momenta, and the bytes that this rank sends for it; an empty string without
    a 1-bit optimizer. `config` is that of the optimizer, `completed`."""
    if not isinstance(config, OneBitAdamConfig | OneBitLambConfig):
        return ""
    from gptlite.satellites.onebit.reduction import OneBitReduction  # not in other runs

    frozen = f"after step {config.freeze_step} (optimizer.freeze_step)"
    if not isinstance(mesh.reduction, OneBitReduction):
        key = f"optimizer={optimizer_name(type(config))}"
        return f"momenta: not exchanged, although {key}: there is a single data rank; second moments are fixed {frozen}"
    exchange, when = mesh.reduction.exchange, frozen
    if isinstance(config, ZeroOneAdamConfig):
        when = f"in steps that do not refresh second moments, which are fixed {frozen}"
        if config.local_step_clipper > 1:
            when += f", and from then on in every step to one of {config.local_step_clipper}"
    kind = "replicas" if exchange.axis == "dp_replicate" and mesh.size("dp_shard") > 1 else "data ranks"
    sent, dense = map(float, exchange.bytes())
    return (
        f"momenta: signs between {exchange.size} {kind}, with error feedback, {when}; this rank then sends "
        f"{format_bytes(sent)} per step, {sent / dense:.3g} of the {format_bytes(dense)} of gradients in fp32"
    )
