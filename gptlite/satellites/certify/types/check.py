"""Check of the types of a training step's collectives, at the true size of the world.

A few ranks stand for all: the first of the first, of a middle and of the last pipeline stage, and for each axis the
last rank along it. What all ranks do alike is held against the types on one of them; what only some do, such as
counting a replicated loss, is compared between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gptlite.config.batch import check_world
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, first_line
from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import Layout, num_stages, rule
from gptlite.satellites.certify.types.atoms import Atoms
from gptlite.satellites.certify.types.declared import Declarations, declarations
from gptlite.satellites.certify.types.flow import Call
from gptlite.satellites.certify.types.step import Trace, traced
from gptlite.satellites.plan.parameters import repeats, with_blocks
from gptlite.satellites.plan.planning import with_planned_vocabulary, workload_of
from gptlite.satellites.plan.workload import Workload

PIPELINES = "messages of the pipeline's schedule: each stage is checked alone, and parity sees what they carry"


@dataclass(frozen=True)
class TypesReport:
    """Result of a check. `collectives`: number of collectives that were checked. `message`: one line, empty if all have
    the types they need. `holes`: what types cannot see in this run."""

    passed: bool
    collectives: int
    message: str
    holes: tuple[str, ...]


def check_types(config: Config, world: int, declared: Declarations | None = None) -> TypesReport:
    """Check the types of a step of `config` on `world` ranks, in a process without a process group.

    `declared`: the declarations of types; None for those of the loaded classes. Raises ConfigError for a layout that
    does not fit `world`, or whose axes types cannot describe.
    """
    layout = check_world(config, world)
    sized, _ = with_planned_vocabulary(config, lambda _: None)
    full = workload_of(sized, layout, sized.cluster)
    work, atoms = _small(full), Atoms.of(layout)
    declared = declarations() if declared is None else declared
    traces: dict[int, Trace] = {}
    faults: list[str] = []
    if world > 1:
        for rank in _ranks(atoms):
            try:
                traces[rank] = traced(work, rank, declared)
            except ConfigError:
                raise
            except Exception as error:  # a model may raise anything
                faults.append(f"rank {rank}: the step raises {type(error).__name__}: {first_line(error)}")
                break
            faults += traces[rank].faults
            if faults:
                break  # what follows from the first fault only hides it
        else:
            faults = list(_between(traces, atoms))
    count = sum(len(trace.calls) for trace in traces.values())
    return TypesReport(not faults, count, faults[0] if faults else "", tuple(_holes(full, traces)))


def _small(work: Workload) -> Workload:
    """Return the workload with as few micro-batches and blocks as have all kinds of collectives, on a CPU."""
    config = replace(work.parallelism, offload=Offload.none)
    if config.activation_checkpointing is ActivationCheckpointing.offload:
        config = replace(config, activation_checkpointing=ActivationCheckpointing.none)
    count = min(work.micro_batches, 2)
    if config.pipeline > 1:
        sizes = range(max(2, config.pipeline), work.micro_batches)
        count = next((each for each in sizes if rule(config).runs(config.pipeline, each)), work.micro_batches)
    model = with_blocks(work.model, max(2, num_stages(config))) if repeats(work.model) else work.model
    batch = count * work.micro_batch_size * work.layout.data_size
    small = replace(work, model=model, parallelism=config, global_batch_size=batch, device="cpu", fp8=False)
    return replace(small, imbalance=1.0)


def _ranks(atoms: Atoms) -> list[int]:
    """Return the ranks that stand for all, first those that differ in what they run."""
    layout = atoms.layout
    size, stride = layout.size("pp"), layout.stride("pp")
    stages = list(dict.fromkeys([0, size - 1, size // 2]))
    firsts = [stage * stride for stage in stages]
    tensor, pipeline = atoms.along("tp"), atoms.along("pp")
    out = list(firsts)
    for first in firsts[:2]:
        for atom in range(len(atoms.sizes)):
            mine = 1 << atom
            # The data axes do the same on all stages, and the last has all that any has.
            if not mine & pipeline and (mine & tensor or first == firsts[min(1, len(firsts) - 1)]):
                out.append(atoms.last_along(first, atom))
    return list(dict.fromkeys(out))


def _between(traces: Mapping[int, Trace], atoms: Atoms) -> Iterator[str]:
    """Yield what is wrong between ranks that should do the same, or of which one should count a value for all."""
    for rank, trace in traces.items():
        for atom in range(len(atoms.sizes)):
            first = rank - (rank // atoms.strides[atom] % atoms.sizes[atom]) * atoms.strides[atom]
            if first != rank and first in traces and not (1 << atom) & atoms.along("pp"):
                yield from _compared(traces[first], trace, atom, atoms)
    counted = {name for trace in traces.values() for name in trace.counted}
    stages: dict[str, int] = {}
    for trace in traces.values():
        for name in trace.counted:
            stage = atoms.layout.coordinate(trace.rank, "pp")
            if stages.setdefault(name, stage) != stage:
                yield f"the gradient norm counts {name} on the stages {stages[name]} and {stage}, which hold copies"
    for trace in traces.values():
        yield from (f"the gradient norm misses {name}" for name in trace.trained if name not in counted)


def _compared(first: Trace, last: Trace, atom: int, atoms: Atoms) -> Iterator[str]:
    """Yield what is wrong between the first and the last rank along an atom."""
    mine, axis, size = 1 << atom, atoms.words(1 << atom), atoms.sizes[atom]
    firsts, lasts = _alike(first), _alike(last)
    for one, other in zip(firsts, lasts, strict=False):
        if (one.kind, one.atoms, one.operator) != (other.kind, other.atoms, other.operator):
            yield (
                f"{one.where}: rank {first.rank} issues {one.kind} over {atoms.words(one.atoms)}, and rank {last.rank} "
                f"{other.kind} over {atoms.words(other.atoms)}"
            )
            return
        if one.atoms & mine and one.size != other.size and one.kind != "all_to_all":
            yield (
                f"{one.where}: rank {first.rank} passes {one.size} bytes to {one.kind} over {atoms.words(one.atoms)}, "
                f"and rank {last.rank} {other.size}"
            )
        if one.atoms & mine and one.zero != other.zero:
            rank = first.rank if one.zero else last.rank
            yield f"{one.where}: rank {rank} passes zeros to {one.kind} over {atoms.words(one.atoms)}, others do not"
        if one.same & other.same & mine:
            yield (
                f"{one.where}: {one.kind} over {atoms.words(one.atoms)} adds up a value that is the same on all ranks "
                f"of {axis}: expected P, found R, which counts it {size} times"
            )
    if len(firsts) != len(lasts):
        rank, longer = max((first.rank, firsts), (last.rank, lasts), key=lambda each: len(each[1]))
        missing = longer[min(len(firsts), len(lasts))]
        yield f"{missing.where}: only rank {rank} issues {missing.kind} over {atoms.words(missing.atoms)}"
    for name, cut in first.parameters.items():
        here, there = name in first.counted, name in last.counted
        if cut & mine and here != there:
            yield f"the gradient norm counts {name} on some of the ranks of {axis} only, which hold shards of it"
        elif not cut & mine and here and there:
            yield f"the gradient norm counts {name} on every rank of {axis}, which hold copies of it: {size} times"
        elif not cut & mine and there and not here:
            yield f"the gradient norm counts {name} on the last rank of {axis} alone"


def _alike(trace: Trace) -> list[Call]:
    """Return the collectives that all ranks issue: all but the exchange of whole matrices in the update, in which ranks
    own different matrices."""
    return [call for call in trace.calls if (call.where, call.kind) != ("the update", "all_to_all")]


def _holes(work: Workload, traces: Mapping[int, Trace]) -> Iterator[str]:
    """Yield what types cannot see in a run."""
    layout: Layout = work.layout
    config = work.parallelism
    if layout.size("pp") > 1:
        yield PIPELINES
    if config.offload is not Offload.none or config.activation_checkpointing is ActivationCheckpointing.offload:
        yield "offload: checked without it, as it moves values between a rank's memories only"
    if work.fp8:
        yield "fp8: checked in bf16, as scales are those of a rank's own tensors"
    if layout.size(*DATA_AXES) > 1:
        yield "ZeRO's messages on gloo, which replace FSDP2's collectives by sums of pairs"
    yield from sorted({hole for trace in traces.values() for hole in trace.holes})
