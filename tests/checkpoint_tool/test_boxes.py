"""Where elements lie, and the numbers that describe them."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from gptlite.checkpoint import metadata
from gptlite.checkpoint.manifest import DamagedCheckpoint, read_manifest
from gptlite.satellites.checkpoint_tool.statistics import distance, statistics
from gptlite.unpickle import unpickle

FIXTURE = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "v1" / "step-00000003"
KEY = "model.token_embedding.weight"
OVERLAPPING = [
    ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([7, 4])),
    ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([6, 4])),
]


def test_boxes_are_found_with_their_bytes():
    found = metadata.boxes_of(metadata.read_metadata(FIXTURE, read_manifest(FIXTURE)), KEY)
    assert [(box.offsets, box.sizes, at.relative_path, at.offset, at.length) for box, at in found] == [
        ((0, 0), (7, 4), "__0_0.distcp", 0, 1641),
        ((7, 0), (6, 4), "__1_0.distcp", 0, 1641),
    ]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda entry, storage: entry.chunks.pop(), "its boxes hold 28 of 52"),
        (lambda entry, storage: entry.chunks.__setitem__(1, entry.chunks[0]), "its boxes hold 56 of 52"),
        (
            lambda entry, storage: setattr(entry.chunks[1], "offsets", torch.Size([6, 0])),
            "box at [6, 0] is in no file",
        ),
        (lambda entry, storage: entry.chunks.__setitem__(slice(None), OVERLAPPING), "at [0, 0] and [3, 0] overlap"),
        (lambda entry, storage: setattr(next(iter(storage.values())), "offset", 10**6), "does not contain its box"),
        (lambda entry, storage: setattr(next(iter(storage.values())), "relative_path", "../x"), "does not contain its"),
    ],
)
def test_verify_wants_each_element_in_exactly_one_box(monkeypatch, harm, reason):
    """A writer's fault: the bytes are those that were written."""

    def harmed(*given):
        found = unpickle(*given)
        entry = found.state_dict_metadata[KEY]
        info = next(iter(found.storage_data.values()))
        found.storage_data[MetadataIndex(KEY, torch.Size([3, 0]))] = info
        harm(entry, found.storage_data)
        return found

    monkeypatch.setattr(metadata, "unpickle", harmed)
    with pytest.raises(DamagedCheckpoint) as error:
        metadata.read_metadata(FIXTURE, read_manifest(FIXTURE))
    assert KEY in error.value.reason
    assert reason in error.value.reason


def test_statistics_of_what_is_not_finite():
    numbers = statistics(torch.tensor([1.0, 3.0, 0.0, float("nan"), float("-inf")], dtype=torch.bfloat16))
    assert [numbers[key] for key in ("elements", "zero", "nan", "inf", "min", "max")] == [5, 1, 1, 1, 0, 3]
    assert numbers["mean"] == pytest.approx(4 / 3)
    assert numbers["norm"] == pytest.approx(10**0.5)
    assert numbers["std"] == pytest.approx((14 / 9) ** 0.5)
    assert statistics(torch.empty(0, 3))["mean"] is None
    assert statistics(torch.tensor([True, False]))["zero"] == 1


def test_distance_of_what_is_not_finite():
    nan, inf = float("nan"), float("inf")
    same = distance(torch.tensor([nan, inf, 1]), torch.tensor([nan, inf, 1]))
    assert (same.differing, same.largest, same.relative) == (0, 0, 0)
    one = distance(torch.tensor([nan, 1.0]), torch.tensor([2.0, 1.0]))
    assert (one.differing, one.largest) == (1, inf)
    assert distance(torch.zeros(2), torch.ones(2)).relative == inf
