"""Each optimizer on shards with one row, or none, along every axis, and on scalars: the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distributed.cells.reshard import drawn
from distributed.cells.reshard_pairs import Layout
from distributed.cells.run import GrowingRanks
from distributed.cells.steps import joined
from gptlite.config.plugins import import_installed
from gptlite.ops.matrices import Matrices
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import OPTIMIZERS
from gptlite.optimizer.rounded import RoundedOptimizer, set_step
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.tensor import TensorAxis, cut
from gptlite.parallelism.zero import shard
from gptlite.satellites.parity.gather import gather

STEPS = 2
SHAPES = [
    (),
    (1, 40),
    (3, 40),
    (40, 1),
    (1, 1),
    (2, 3),
    (7, 5),
    (1,),
    (3,),
    (1, 4, 6),
    (3, 1, 5),
    (2, 3, 1),
    (2, 1, 3, 4),
]
FEW = [(), (1, 40), (40, 1), (1,), (1, 4, 6)]
import_installed()  # registers those in gptlite.satellites.optimizers
# Apex needs a GPU, and the momenta of 1-bit optimizers are not those of one process (tests/onebit).
NAMES = [name for name in OPTIMIZERS if not name.startswith(("apex_", "onebit_", "zero_one_"))]
LAYOUTS = [
    Layout(tensor=2, data=2, zero=3),
    Layout(data=2, zero=3),
    Layout(tensor=4),
    Layout(data=4, zero=1, replicate=2),
    Layout(tensor=2, data=2),
    Layout(tensor=3, data=2, zero=2),
    Layout(tensor=2, data=3, zero=3),
    Layout(data=7, zero=3),
    Layout(tensor=2, data=4, zero=3, replicate=2),
]


ROUNDED = [name for name in NAMES if OPTIMIZERS[name].elementwise]  # for bf16 parameters


class Holder(nn.Module):
    """Parameters, each in a shape and sharded along a dim over the tensor ranks, if there are several."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.held = nn.ParameterDict()
        axis = TensorAxis(mesh.along("tp"), sequence=False, overlap=False) if mesh.size("tp") > 1 else None
        # Each dim in turn is the one that tensor ranks share.
        for shape, dim in ((each, dim) for each in shapes for dim in (None, *range(len(each)))):
            name = f"{'x'.join(map(str, shape))}_{dim}"
            whole = nn.Parameter(drawn(name, torch.Size(shape), "start").to(dtype))
            self.held[name] = whole if axis is None or dim is None else cut(whole, axis, dim)


def off(layout: Layout, world: int, name: str, shapes: list[tuple[int, ...]], reference: str) -> list[str] | None:
    """On the first `world` ranks: on rank 0, the weights and states that differ from those in a file."""
    with joined(world, name) as is_in:
        found = stepped(layout, shapes) if is_in else None
    if found is None:
        return None
    expected = torch.load(reference)
    assert found.keys() == expected.keys()
    near = {True: {"rtol": 0, "atol": 0}, False: {"rtol": 1e-5, "atol": 1e-6}}
    return [
        key for key, value in expected.items() if not torch.allclose(found[key], value, **near[key.startswith("bf16")])
    ]


def stepped(layout: Layout, shapes: list[tuple[int, ...]]) -> dict[str, Tensor] | None:
    """All weights and states of each optimizer after some steps, whole on rank 0."""
    config = ParallelismConfig(tensor=layout.tensor, data=layout.data, zero=layout.zero, dp_replicate=layout.replicate)
    mesh = build_mesh(config)
    cases = [(name, torch.float32) for name in NAMES] + [(name, torch.bfloat16) for name in ROUNDED]
    found: dict[str, Tensor] = {}
    for name, dtype in cases:
        wholes = gather(_steps(name, Holder(mesh, dtype, shapes), mesh, config).items()) or {}
        assert not any(whole.disagreements for whole in wholes.values())
        found |= {f"{str(dtype)[6:]} {name} {key}": whole.value.detach() for key, whole in wholes.items()}
    mesh.close()
    return found or None


def _steps(name: str, module: Holder, mesh: Mesh, config: ParallelismConfig) -> dict[str, Tensor]:
    dtype = next(module.parameters()).dtype
    shard(module, [], mesh, config, dtype)
    parameters = dict(module.named_parameters())
    batched = tuple(key for key, parameter in parameters.items() if parameter.ndim == 3)
    optimizer = build_optimizer(OPTIMIZERS[name](lr=0.05), parameters.items(), Matrices(batched=batched))
    if dtype == torch.bfloat16:
        optimizer = RoundedOptimizer(optimizer, seed=3)
    for step in range(STEPS):
        set_step(optimizer, step)
        for key, parameter in parameters.items():
            whole = drawn(key, parameter.shape, f"gradient {step}")
            sizes, starts = local_box(parameter)
            box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            local_tensor(parameter.grad).detach().copy_(whole[box])
        optimizer.step()
    return {**parameters, **optimizer_state(optimizer)}


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        pytest.param(LAYOUTS[0], FEW, id="few"),
        *[pytest.param(each, SHAPES, id=each.id, marks=pytest.mark.slow) for each in LAYOUTS],
    ],
)
def test_steps_on_thin_shards_are_those_of_one_process(
    layout: Layout, shapes: list[tuple[int, ...]], growing: GrowingRanks, tmp_path: Path
):
    """Those of bf16 parameters, which are rounded stochastically, to the bit."""
    torch.save(stepped(Layout(), shapes), tmp_path / "alone")
    found = growing.run(layout.world, "distributed.test_thin_shards:off", layout, shapes, str(tmp_path / "alone"))
    assert found[0] == []
