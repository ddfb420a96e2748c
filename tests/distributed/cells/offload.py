"""What ranks do in test_offload.py: the first steps of a run, with and without offload, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from distributed.cells.compare import same_bits
from distributed.cells.layouts import BASE, GLOBAL_BATCH
from distributed.cells.reshard import held_out_loss
from distributed.cells.steps import built, planned_work
from gptlite.config import Config, load
from gptlite.models.capabilities import Sampling, TextGeneration, capability
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.config import Offload
from gptlite.satellites.monitor.memory_watch import MemoryWatch
from gptlite.satellites.monitor.model_state import StateBytes
from gptlite.satellites.nvme.infinite import InfiniteStream
from gptlite.satellites.nvme.streamed import StateStream
from gptlite.satellites.plan.memory import estimate
from gptlite.satellites.plan.parameters import stages
from gptlite.satellites.plan.traffic import OffloadBytes, buffers_bytes, moved
from gptlite.satellites.plan.workload import RankBytes
from gptlite.torch_private.fsdp import watched_shards
from gptlite.trainer.state import TrainState

STEPS = 3
Bits = dict[str, object]


@dataclass(frozen=True)
class Case:
    """A run, as overrides of train.py, and the ranks that it takes."""

    words: str
    world: int = 1
    accumulation: int = 2
    layers: int = 4

    def overrides(self) -> list[str]:
        layout = dict(word.split("=") for word in self.words.split() if word.startswith("parallelism."))
        inner = prod(int(layout.get(f"parallelism.{axis}", 1)) for axis in ("tensor", "pipeline", "context"))
        data = self.world // inner
        return [
            *BASE,
            f"model.num_layers={self.layers}",
            "precision=fp32",
            f"parallelism.data={data}",
            f"data.micro_batch_size={GLOBAL_BATCH // (data * self.accumulation)}",
            *self.words.split(),
        ]


def config_of(case: Case, offload: str, path: str | None = None) -> Config:
    """Of a case's run with that offload; `infinite`: of the parameters and gradients too."""
    config = load(case.overrides())
    buffer = 1 if path else config.parallelism.offload_buffer_mib
    infinite = offload == "infinite"
    kind = Offload.nvme if infinite else Offload[offload]
    parallelism = replace(config.parallelism, offload=kind, offload_path=path, offload_buffer_mib=buffer)
    parallelism = replace(parallelism, offload_parameters=infinite)
    return replace(config, parallelism=parallelism)


def differing(case: Case, offload: str, path: str | None = None) -> list[str]:
    """On every rank: what of the steps of a run with offload is not, to the bit, what it is without."""
    return _differing(_plain(case), take(config_of(case, offload, path)))


def interrupted(case: Case, offload: str, path: str | None = None) -> list[str]:
    """As `differing`, with an evaluation and a sample after each step; and what of the steps these change."""
    plain, offloaded = (
        take(config, looks=True) for config in (config_of(case, "none"), config_of(case, offload, path))
    )
    looks = [[{key: step.pop(key) for key in ("evaluation", "sample")} for step in run] for run in (plain, offloaded)]
    return _differing(*looks) + _differing(plain, offloaded) + _differing(_plain(case), offloaded)


def _differing(plain: list[Bits], offloaded: list[Bits]) -> list[str]:
    assert [step.keys() for step in plain] == [step.keys() for step in offloaded]
    return [
        f"step {number} {key}"
        for number, (ours, theirs) in enumerate(zip(offloaded, plain, strict=True), 1)
        for key, value in theirs.items()
        if not same_bits(ours[key], value)
    ]


@lru_cache(maxsize=1)  # the next test is of the same run with the other kind of offload
def _plain(case: Case) -> list[Bits]:
    return take(config_of(case, "none"))


def take(config: Config, looks: bool = False) -> list[Bits]:
    """The losses, norms, gradients, values and optimizer state of the steps, this rank's parts.

    `looks`: with the loss of an evaluation after each step, and the tokens of a sample.
    """
    with built(config) as (_, state, step):
        gradients: Bits = {}

        def inspect(state: TrainState) -> None:
            for name, parameter in state.named_parameters():
                if parameter.grad is not None:
                    gradients[f"gradient {name}"] = local_tensor(parameter.grad).detach().clone()

        found = []
        for _ in range(STEPS):
            result = step(state, inspect)
            tensors = {key: local_tensor(tensor).detach().clone() for key, tensor in state.tensors().items()}
            found.append({"loss": result.loss, "norm": result.grad_norm} | gradients | tensors)
            if looks:
                found[-1] |= {"evaluation": held_out_loss(state), "sample": _sample(state)}
        return found


def _sample(state: TrainState) -> list[int]:
    writer = capability(state.model.spec, TextGeneration)
    assert writer is not None
    return list(writer.generate(state.runner, [3, 1, 4], 9, Sampling(seed=1), stop=None, cache=True))


def counted(case: Case, offload: str, path: str | None = None) -> tuple[OffloadBytes, OffloadBytes]:
    """On every rank: what a step of a run has moved, the second one, and what the plan says that one moves."""
    config = config_of(case, offload, path)
    with built(config) as (mesh, state, step):
        stream = getattr(state.optimizer, "stream", None)
        step(state)
        there: list[int] = []
        back: list[int] = []
        before = _through(stream)
        with watched_shards(state.parts, there.append, back.append):
            step(state)
        after = _through(stream)
        planned = moved(planned_work(config, mesh, state), mesh.coordinate("pp"), mesh.coordinate("tp"))
        return OffloadBytes(sum(there), sum(back), after[0] - before[0], after[1] - before[1]), planned


def _through(stream: StateStream | None) -> tuple[int, int]:
    """The bytes read and written so far; what is under way belongs to the step before."""
    if stream is None:
        return 0, 0
    stream.wait()
    files = [stream.file, *([stream.parameters.file] if isinstance(stream, InfiniteStream) else [])]
    return sum(file.bytes_read for file in files), sum(file.bytes_written for file in files)


def file_size(config: Config) -> int:
    """The size of this rank's files."""
    with built(config) as (_, state, _):
        stream: StateStream = state.optimizer.stream  # type: ignore[attr-defined]
        return stream.file.size + (stream.parameters.file.size if isinstance(stream, InfiniteStream) else 0)


def buffers(case: Case, offload: str, path: str) -> tuple[int, int]:
    """On every rank: the bytes of the buffers that a run has, and those of the plan."""
    config = config_of(case, offload, path)
    with built(config) as (mesh, state, _):
        stream: StateStream = state.optimizer.stream  # type: ignore[attr-defined]
        found = sum(each.nbytes for each in stream.resident() if each.ndim)  # not the counts of steps
        return found, buffers_bytes(work := planned_work(config, mesh, state), stages(work, 0))


def memory(case: Case, offload: str, path: str | None = None) -> tuple[StateBytes, RankBytes, int]:
    """On every rank: the model state found in a step, the planned memory, and the activations found."""
    config = config_of(case, offload, path)
    with built(config) as (mesh, state, step):
        step(state)
        with MemoryWatch(state.parts, state.optimizer, mesh.device, state.loader.num_micro_batches) as watch:
            step(state)
        found, work = watch.found(), planned_work(config, mesh, state)
        return found.state, estimate(work, mesh.coordinate("pp"), mesh.coordinate("tp")), found.activations
