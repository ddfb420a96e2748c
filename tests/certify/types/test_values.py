"""Types of tensors that share storages, atoms of layouts, and what declarations call for."""

from typing import Annotated

import pytest
import torch

from gptlite.parallelism.layout import Layout
from gptlite.satellites.certify.types.atoms import Atoms
from gptlite.satellites.certify.types.declared import Declared, declarations
from gptlite.satellites.certify.types.values import SAME, ZERO, ValueType, ValueTypes, varying

TP, DP = varying(1), varying(2)


def test_a_result_differs_where_an_input_differs():
    assert varying(3) == TP | DP
    assert TP | SAME == TP
    assert ZERO | ZERO == ZERO
    assert not (ZERO | SAME).zero


def test_a_sum_is_the_same_and_a_shard_of_one_is_no_longer_partial():
    assert (TP | DP).equal_over(1) == DP
    assert (TP | DP).summed_over(2) == ValueType(varies=3, unsummed=1)


def test_views_share_types_and_ranges_keep_theirs():
    values, whole = ValueTypes(), torch.zeros(4, 8)
    values.set(whole, SAME)
    values.set(whole[1], TP)
    assert values.of(whole[0]) == SAME
    assert values.of(whole.view(-1)[8:10]) == TP
    assert values.of(whole) == TP
    values.set(whole[:, 2], DP)  # the elements between keep their types
    assert values.of(whole[1]) == TP | DP
    values.set(whole, SAME)
    assert values.spans(whole) == [(0, whole.nbytes, SAME)]


def test_rows_of_a_buffer_are_alike():
    values, buffer = ValueTypes(), torch.zeros(3 * 5)
    values.set_spans(buffer, [(0, 8, TP), (8, 20, SAME)], period=20)
    assert values.row(buffer) == [(0, 8, TP), (8, 20, SAME)]
    assert values.of(buffer.view(3, 5)[2, :2]) == TP
    assert values.of(buffer.view(3, 5)[1, 2:]) == SAME
    assert values.of(buffer) == TP


def test_a_freed_storage_leaves_no_type():
    values = ValueTypes()
    tensor = torch.zeros(3)
    values.set(tensor, TP)
    del tensor
    assert not values._storages


def test_axes_are_products_of_atoms():
    atoms = Atoms.of(Layout((4, 1, 128, 8), (2, 4)))  # pipeline, replicas, shards, tensor; context 2, experts 4
    assert atoms.sizes == (8, 2, 2, 32, 4)
    assert atoms.along("dp_shard") == 0b01110
    assert (atoms.along("cp"), atoms.along("ep"), atoms.along("tp"), atoms.along("pp")) == (2, 6, 1, 16)
    assert atoms.words(atoms.along("tp")) == "tp"
    assert atoms.words(0b01000) == "edp_shard"
    assert atoms.words(atoms.along("dp_shard") & ~atoms.along("ep") | 1) == "edp_shard x tp"


def test_a_group_that_lacks_a_rank_is_no_axis():
    atoms = Atoms.of(Layout((1, 1, 4, 2)))
    assert atoms.of_ranks(range(8)) == atoms.world
    assert atoms.of_ranks([1, 3, 5, 7]) == atoms.along("dp_shard")
    assert atoms.of_ranks([1, 3, 5]) is None
    assert atoms.last_along(1, 1) == 7


@pytest.mark.parametrize(
    ("text", "sequence", "forward", "backward"),
    [
        ("I -> R", False, "", "all_reduce"),
        ("P -> I", False, "all_reduce", ""),
        ("P -> R", False, "all_reduce", "all_reduce"),
        ("S(1) -> R", False, "all_gather", "reduce_scatter"),
        ("P -> S(1)", False, "reduce_scatter", "all_gather"),
        ("S(0) -> S(0)", False, "all_to_all", "all_to_all"),
        ("V -> V", False, "", ""),
        ("I -> R", True, "all_gather", "reduce_scatter"),
        ("P -> I", True, "reduce_scatter", "all_gather"),
    ],
)
def test_a_declaration_says_what_both_passes_communicate(text, sequence, forward, backward):
    declared = Declared.of(text, sequence)
    assert (declared.forward, declared.backward) == (forward, backward)


def test_a_declaration_in_another_form_is_refused():
    with pytest.raises(ValueError, match=r"'P to I' is not of the form"):
        Declared.of("P to I")


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> Annotated[torch.Tensor, "P -> I"]:
        return x


def test_annotations_are_read_as_text_and_as_types():
    found = {cls.__name__: text for (cls, _), text in declarations().items()}
    assert found["Summed"] == "P -> I"
    assert found["_Copy"] == "I -> R"
    assert found["RowParallelLinear"] == "P -> I"
