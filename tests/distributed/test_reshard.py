"""A checkpoint of any layout is loaded by any other, bit for bit, and saved by that one again as it was."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from marking import marked
from torch import Tensor

from distributed.cells.compare import same_bits
from distributed.cells.reshard import COUNTERS, SAVED, STEP, drawn, fill, filled, held_out_loss
from distributed.cells.reshard_pairs import ALL, LAYOUTS, QUICK, SINGLE, SLOW, Layout, Pair
from distributed.cells.run import GrowingRanks
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import describe, read_manifest, verify
from gptlite.config import Config, load
from gptlite.parallelism.mesh import build_mesh

CASES = "distributed.cells.reshard:"


def config_of(pair: Pair, layout: Layout, folder: Path, *overrides: str) -> Config:
    return load([*pair.overrides(layout), f"run.dir={folder}", *overrides])


def whole(pair: Pair) -> tuple[dict[str, Tensor], float]:
    """The values of a pair's model in one process, by key, and its loss."""
    shared = [override for override in pair.overrides(SINGLE) if not override.startswith("parallelism.")]
    return _whole(tuple(shared))


@lru_cache
def _whole(overrides: tuple[str, ...]) -> tuple[dict[str, Tensor], float]:
    config = load([*overrides, "run.dir=unused"])
    state = filled(config, build_mesh(config.parallelism), SAVED)
    loss = held_out_loss(state)
    state.loader.close()
    return {key: drawn(key, tensor.shape, SAVED) for key, tensor in state.tensors().items()}, loss


def check_stored(folder: Path, expected: dict[str, Tensor]) -> None:
    """The folder holds these tensors whole, bit for bit, and no others."""
    verify(folder, print)
    assert read_manifest(folder).tensors == {key: describe(tensor) for key, tensor in expected.items()}
    into = {key: torch.full_like(tensor, torch.nan) for key, tensor in expected.items()}
    load_tensors(folder, into)
    assert [key for key in into if not same_bits(into[key], expected[key])] == []


REST = [pair for pair in ALL if pair not in QUICK + SLOW]


@pytest.mark.parametrize("pair", marked([*QUICK, *SLOW, *REST], len(QUICK), len(SLOW), lambda pair: pair.id))
def test_a_checkpoint_is_loaded_by_another_layout_and_saved_again(pair: Pair, growing: GrowingRanks, tmp_path: Path):
    expected, loss = whole(pair)
    source, target = pair.source, pair.target
    folder, *others = growing.run(source.world, CASES + "save", config_of(pair, source, tmp_path / "a"))
    assert folder == tmp_path / "a" / "checkpoints" / f"step-{STEP:08d}"
    assert set(others) <= {folder}
    check_stored(folder, expected)

    config = config_of(pair, target, tmp_path / "b", f"checkpoint.resume={folder}")
    resumed = growing.run(target.world, CASES + "resume", config)
    assert resumed[0].wrong == []
    assert {each.folder for each in resumed} == {tmp_path / "b" / "checkpoints" / folder.name}
    assert all(each.counters == COUNTERS for each in resumed)
    assert [each.loss for each in resumed] == pytest.approx([loss] * target.world, rel=1e-5)
    check_stored(resumed[0].folder, expected)


def test_the_pairs_are_many_and_every_degree_saves_and_loads_with_every_stage_of_zero():
    assert len(ALL) == len({pair.id for pair in ALL}) >= 48
    assert sum(pair.model != "untied" for pair in ALL) >= 40
    assert all(pair.source != pair.target for pair in ALL)
    for end in ("source", "target"):
        ends = [getattr(pair, end) for pair in ALL]
        for degree, values in (("tensor", (1, 2, 4)), ("pipeline", (1, 2, 4))):
            met = {(getattr(layout, degree), layout.zero) for layout in ends if layout.data > 1 or not layout.zero}
            assert met >= {(value, zero) for value in values for zero in range(4)}, (end, degree)
        assert {layout.world for layout in ends} == set(range(1, 9))
        assert set(LAYOUTS) <= set(ends)
    assert all(pair.world <= 4 for pair in QUICK)


def test_the_values_differ_from_element_to_element_and_key_to_key_and_the_loss_tells():
    expected, loss = whole(Pair(SINGLE, SINGLE))
    weights = torch.cat([tensor.flatten() for key, tensor in expected.items() if key.startswith("model.")])
    assert len(weights.unique()) > 0.99 * len(weights)
    steps = [tensor.item() for key, tensor in expected.items() if key.endswith(".step")]
    assert len(set(steps)) > 0.99 * len(steps)
    config = load([*Pair(SINGLE, SINGLE).overrides(SINGLE), "run.dir=unused"])
    state = filled(config, build_mesh(config.parallelism), SAVED)
    with torch.no_grad():
        qkv = state.parts[0].get_parameter("layers.3.attn.qkv.weight")
        qkv.copy_(qkv.roll(15, 0))  # each head gets the one before it: 3 x 5 rows
    assert held_out_loss(state) != pytest.approx(loss, rel=1e-4)
    fill(state, SAVED)
    assert held_out_loss(state) == loss
    state.loader.close()
