"""What finds a fault: each of the ways of looking at a run in which a bug or a mutation is planted, on every rank."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed.cells.bugs import BUGS, planted
from distributed.cells.compare import limits_of, read_records, same_bits
from distributed.cells.layouts import Cell
from distributed.cells.mutations import drawn, every, mutated
from distributed.cells.public_faults import REPORTS
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.config import Config
from gptlite.config.saved import to_yaml
from gptlite.parallelism.collectives import broadcast_text
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.monitor.replicas import ReplicasDiffer, check_replicas
from gptlite.satellites.parity.compare import Distances, compare
from gptlite.satellites.parity.gather import gather
from gptlite.satellites.parity.record import build, recorded
from gptlite.satellites.parity.report import verdict
from gptlite.trainer.state import TrainState

MUTATIONS = every()
STEPS = 2


def faults() -> list[str]:
    """Return the names of the faults of the table: analogues of public ones, then mutations drawn at random."""
    return list(dict.fromkeys([*(report.fault for report in REPORTS if report.fault), *drawn()]))


def cell_of(fault: str) -> Cell:
    """The layout on which a fault shows."""
    return BUGS[fault].cell if fault in BUGS else MUTATIONS[fault].place.cell


@contextmanager
def fault_planted(fault: str) -> Iterator[None]:
    """While entered, a bug or a mutation is in this process."""
    with ExitStack() as stack:
        stack.enter_context(planted(fault) if fault in BUGS else mutated(MUTATIONS[fault]))
        yield


@dataclass(frozen=True)
class Findings:
    """What parity, the comparison of copies and a resumed run say of a fault; empty: nothing."""

    parity: str
    copies: str
    resume: str


def look(config: Config, reference: str, apart: Sequence[Distances] | None, fault: str, *_: object) -> Findings | None:
    """On every rank: two steps with a fault, each judged, their copies compared, and a third step taken by the run and
    by one that is resumed from its checkpoint."""
    mesh = build_mesh(config.parallelism)
    try:
        with fault_planted(fault):
            parity = _parity(config, reference, apart, mesh)
            copies, resume = _copies_and_resume(config, mesh)
    finally:
        mesh.close()
    return Findings(parity, copies, resume) if mesh.is_main else None


def _parity(config: Config, reference: str, apart: Sequence[Distances] | None, mesh: Mesh) -> str:
    limits = limits_of(apart, config.precision.dtype.value)
    comparisons = []
    for index, record in enumerate(recorded(config, STEPS, mesh)):
        if record is not None:
            comparisons.append(compare(record, read_records(reference)[index], limits))
    if not mesh.is_main:
        return ""
    same, text = verdict(comparisons, limits)
    return "" if same else text


def _copies_and_resume(config: Config, mesh: Mesh) -> tuple[str, str]:
    root = Path(broadcast_text(tempfile.mkdtemp(prefix="gptlite-fault-") if mesh.is_main else ""))
    checkpoints = Checkpointer(config.checkpoint, root, mesh)
    state, take_step = build(config, mesh)
    with closing(state.loader), closing(checkpoints):
        for _ in range(STEPS):
            take_step(state)
        copies, meta = _copies(state, mesh), state.meta()
        folder = checkpoints.save(state.tensors(), meta, to_yaml(config) if mesh.is_main else "", None, _silent)
        result = take_step(state)
        went_on = gather(state.named_parameters())
    state, take_step = build(config, mesh)
    with closing(state.loader):
        state.load(folder, _silent)
        state.load_meta(json.loads(json.dumps(meta)))  # as the manifest keeps it
        again = take_step(state)
        resumed = gather(state.named_parameters())
    if mesh.is_main:
        shutil.rmtree(root)
    if (result.loss, result.grad_norm) != (again.loss, again.grad_norm):
        return copies, f"loss {result.loss} and {again.loss}, norm {result.grad_norm} and {again.grad_norm}"
    if went_on is None or resumed is None:
        return copies, ""
    return copies, ", ".join(name for name in went_on if not same_bits(went_on[name].value, resumed[name].value))


def _silent(_: str) -> None:
    pass


def _copies(state: TrainState, mesh: Mesh) -> str:
    try:
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
    except ReplicasDiffer as error:
        return str(error)
    return ""
