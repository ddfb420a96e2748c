"""Choice of whether a run's steps are replayed from a CUDA graph, and the line of its log on it."""

from gptlite.optimizer.base import OwnOptimizer
from gptlite.optimizer.fused import decides_on_device, is_fused
from gptlite.optimizer.registry import optimizer_name
from gptlite.parallelism.config import Offload
from gptlite.progress import Log
from gptlite.satellites.graph.recorder import CudaRecorder
from gptlite.satellites.graph.steps import WARM_STEPS, RecordedSteps
from gptlite.trainer.build import Run
from gptlite.trainer.step import Execute


def graph_steps(run: Run, log: Log) -> Execute | None:
    """Return what records and replays the steps of a run, if it has `trainer.cuda_graph=auto`, a GPU, and no reason
    against it."""
    return RecordedSteps(CudaRecorder(), log) if wanted(run) and why_not(run) is None else None


def graph_words(run: Run) -> str:
    """Return the line of a run's log; an empty string without a GPU or with `trainer.cuda_graph=false`."""
    if not wanted(run):
        return ""
    reason = why_not(run)
    return f"steps: no CUDA graph, {reason}" if reason else f"steps: one CUDA graph, after {WARM_STEPS} steps without"


def wanted(run: Run) -> bool:
    """Return True if a run has a GPU, and `trainer.cuda_graph=auto`."""
    return run.mesh.device.type == "cuda" and run.config.trainer.cuda_graph.lower() == "auto"


def why_not(run: Run) -> str | None:
    """Return why the steps of a run cannot be recorded; None if nothing is known against it."""
    config, state = run.config, run.state
    name = f"optimizer={optimizer_name(type(config.optimizer))}"
    if run.mesh.world_size > 1:
        return f"which {run.mesh.world_size} ranks do not have yet"
    if config.parallelism.offload is not Offload.none:
        return f"since parallelism.offload={config.parallelism.offload.value} moves model state in each step"
    if state.scaler is not None and state.scaler.deepspeed:
        return "since with precision.loss_scale_rule=deepspeed the host sets the learning rate after each loss"
    if not decides_on_device(state.optimizer, run.mesh.device):
        return f"since the host decides on each update of {name}"
    if not is_fused(state.optimizer) and not isinstance(state.optimizer, OwnOptimizer):
        return f"since torch's kernel of {name} has the learning rate from the host; set ops.adamw=fused"
    if state.spikes is not None:
        return "since trainer.spike.policy=skip may restore a checkpoint between any two steps"
    if state.noise is not None:
        return "since the host takes the noise of gradients from each step"
    if run.mesh.reduction is not None:
        return "since parallelism.deterministic=true reads the largest gradient of each step"
    if not state.model.spec.keyed_dropout:
        return "since the model draws random numbers of its own"
    return None
