"""The declarations, and our types of a forward pass, held against those of spmd-types."""

from dataclasses import replace

import pytest
import spmd_types
import torch
from distributed.cells.layouts import Cell

from certify.types import library
from gptlite.config import load
from gptlite.config.batch import check_world
from gptlite.models.gpt import mlp
from gptlite.parallelism import tensor
from gptlite.satellites.certify.types.declared import declarations
from gptlite.satellites.plan.planning import workload_of

FUNCTIONS = [tensor._Copy, tensor._Sum, tensor._Gather, tensor._Scatter]
MODERN = ("model.position=rope", "model.norm=rms_norm", "model.bias=false", "model.mlp=swiglu")
CELLS = {
    "dense": Cell(tensor=2, tied=False),
    "tied": Cell(tensor=4),
    "sequence": Cell(tensor=2, sequence=True),
    "modern": Cell(tensor=2, sequence=True, shared=MODERN),
    "values": Cell(tensor=2, shared=(*MODERN, "model.value_residual=true")),
}


def forward_types(cell: Cell):

    config = load([*cell.overrides(), "ops.implementation=reference", "model.num_layers=2", "model.dropout=0"])
    layout = check_world(config, cell.world)
    work = replace(workload_of(config, layout, config.cluster), device="cpu")
    return library.forward_types(work, 0, declarations())


@pytest.mark.parametrize("cls", FUNCTIONS)
def test_what_a_function_declares_is_what_it_computes(cls):

    library.numerically_right(cls, declarations()[cls, "forward"], torch.randn(2, 4, 3))


@pytest.mark.parametrize("text", ["S(0) -> R", "S(2) -> R"])
def test_a_wrong_declaration_is_found(text):

    with pytest.raises(spmd_types.rulecheck.RuleCheckError):
        library.numerically_right(tensor._Gather, text, torch.randn(2, 4, 6))


@pytest.mark.parametrize("name", CELLS)
def test_the_library_types_the_forward_pass_as_we_do(name):
    assert forward_types(CELLS[name]) is spmd_types.R


def test_the_library_finds_a_missing_sum(monkeypatch):
    right = mlp.MLP.forward

    def wrong(self, *args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor, "leave", lambda x, axis: x)
            return right(self, *args, **options)

    monkeypatch.setattr(mlp.MLP, "forward", wrong)
    with pytest.raises(spmd_types.SpmdTypeError, match=r"Invariant type .* cannot mix"):
        forward_types(CELLS["dense"])
