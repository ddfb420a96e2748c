"""What is loaded is what was saved, bit for bit, and a checkpoint of something else is refused."""

import re
from dataclasses import replace
from enum import Enum

import pytest
import torch
from checkpoint.conftest import all_bits, fresh, read_bits
from checkpoint.destruction.wounds import flip
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorProperties

from gptlite.checkpoint import manifest
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import DamagedCheckpoint, environment_changes, read_manifest
from gptlite.checkpoint.parts import Parts
from gptlite.errors import ConfigError


def test_every_tensor_comes_back_bitwise_and_in_place(save, tensors):
    folder, into = save(100), fresh(tensors)
    addresses = {key: tensor.data_ptr() for key, tensor in into.items()}
    load_tensors(folder, into)
    assert all_bits(into) == all_bits(tensors)
    assert {key: tensor.data_ptr() for key, tensor in into.items()} == addresses


def test_metadata_that_torch_completes_in_a_copy_is_still_checked(save, tensors, monkeypatch):
    """As torch 2.11 does."""
    finish, into = FileSystemWriter.finish, fresh(tensors)
    monkeypatch.setattr(FileSystemWriter, "finish", lambda self, *given: finish(self, replace(given[0]), given[1]))
    load_tensors(save(3), into)
    assert all_bits(into) == all_bits(tensors)


def test_tied_weight_is_one_key_and_stays_tied(checkpointer):
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = build(), build()
    folder = checkpointer.save(dict(source.named_parameters()), {"step": 1}, "", None, print)
    assert list(read_manifest(folder).tensors) == ["0.weight"]
    load_tensors(folder, dict(target.named_parameters()))
    assert target[0].weight is target[1].weight
    assert torch.equal(target.get_parameter("1.weight"), source.get_parameter("1.weight"))
    assert target.get_parameter("0.weight").requires_grad


def test_meta_config_and_layout(checkpointer, tensors):
    meta = {"step": 7, "tokens": 2**40, "best_val_loss": 0.1 + 0.2, "wandb_id": None, "data_identity": {"corpus": "é"}}
    folder = checkpointer.save(tensors, meta, "a: ü\n", None, print)
    assert read_manifest(folder).meta == meta
    assert read_config(folder) == "a: ü\n"
    assert folder == checkpointer.root / "step-00000007"
    assert (checkpointer.root / "latest").read_text().strip() == folder.name
    assert {path.name for path in folder.iterdir()} == {"data", "MANIFEST.json", "config.yaml"}


def test_the_manifest_lists_files_and_shapes_and_a_different_machine_is_noticed(save, tensors, monkeypatch):
    manifest = read_manifest(save(5))
    assert {"tokenizer/vocab.txt", "tokenizer/extra/merges.txt", "config.yaml", "data/.metadata"} <= set(manifest.files)
    assert manifest.tensors["half"] == {"shape": [33], "dtype": "bfloat16"}
    assert manifest.tensors["count"] == {"shape": [], "dtype": "int64"}
    assert set(manifest.tensors) == set(tensors)
    assert environment_changes(manifest) == []
    now = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert environment_changes(manifest) == [f"threads: {now} then, 4096 now"]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("ids", torch.zeros(4, dtype=torch.int64), "ids is int64 [10] there, int64 [4] here"),
        ("half", torch.zeros(33), "half is bfloat16 [33] there, float32 [33] here"),
        ("layers.1.weight", torch.zeros(2), "layers.1.weight is absent there, float32 [2] here"),
        ("ids", None, "ids is int64 [10] there, absent here"),
    ],
)
def test_another_model_is_refused_in_one_line_and_nothing_is_touched(save, tensors, key, value, named):
    folder = save(100)
    into = fresh(tensors)
    into.pop(key, None)
    if value is not None:
        into[key] = value
    before = all_bits(into)
    with pytest.raises(ConfigError) as refusal:
        load_tensors(folder, into)
    assert f"{named}; set model.*" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert all_bits(into) == before


@pytest.mark.parametrize(
    ("keys", "words"), [(["ids", "half"], "1 other mismatch"), (["ids", "half", "x"], "2 other mis")]
)
def test_a_refusal_counts_the_other_mismatches(save, tensors, keys, words):
    folder = save(100)
    with pytest.raises(ConfigError, match=rf"\(and {words}"):
        load_tensors(folder, fresh(tensors) | {key: torch.zeros(5) for key in keys})


def test_not_strict_reads_a_part_but_still_wants_all_of_it(save, tensors):
    folder = save(100)
    load_tensors(folder, into := fresh({"half": tensors["half"]}), strict=False)
    assert torch.equal(into["half"], tensors["half"])
    with pytest.raises(ConfigError, match="missing is absent there"):
        load_tensors(folder, {"missing": torch.zeros(1)}, strict=False)


def test_only_tensors_are_stored(checkpointer):
    with pytest.raises(TypeError, match="lr is a float"):
        checkpointer.save({"w": torch.zeros(1), "lr": 0.1}, {"step": 1}, "", None, print)
    assert list(checkpointer.root.glob("*step*")) == []


def test_metadata_of_python_3_11_2_is_read(save, tensors, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickles a member of an Enum as getattr of its class: Debian 12 has one of these."""
    kind = type(TensorProperties().__getstate__()[3])
    assert issubclass(kind, Enum)
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
    folder = save(100)
    assert b"getattr" in (folder / "data" / ".metadata").read_bytes()
    assert read_bits(folder, tensors) == all_bits(tensors)


@pytest.mark.parametrize(
    ("tensor", "words"), [(torch.zeros(4, dtype=torch.bfloat16), "bfloat16 [4]"), (torch.zeros(5), "float32 [5]")]
)
def test_ranks_that_mean_different_tensors_by_a_key_are_refused(tensor, words):
    parts = Parts({"w": torch.zeros(4)})
    with pytest.raises(
        ValueError, match=re.escape(f"checkpoint key w is {words} on rank 1, but float32 [4] on a lower rank")
    ):
        parts.share([parts.offered, Parts({"w": tensor}).offered], 0)


def test_damage_is_found_before_a_tensor_is_touched(save, tensors):
    folder, into = save(100), fresh(tensors)
    flip(folder / "data" / "__0_0.distcp")
    with pytest.raises(DamagedCheckpoint, match="SHA-256 differs"):
        load_tensors(folder, into)
    assert all_bits(into) == all_bits(fresh(tensors))


def test_what_was_verified_is_not_hashed_again_but_for_what_is_unpickled(save, tensors, monkeypatch):
    folder, into, hashed = save(100), fresh(tensors), []
    real = manifest._hash
    monkeypatch.setattr(manifest, "_hash", lambda path, *rest, **more: hashed.append(path) or real(path, *rest, **more))
    load_tensors(folder, into, verified=True)
    assert hashed == []
    assert all_bits(into) == all_bits(tensors)
    load_tensors(folder, into)
    assert folder / "data" / "__0_0.distcp" in hashed
    flip(folder / "data" / ".metadata")
    with pytest.raises(DamagedCheckpoint, match=r"data/\.metadata has damaged bytes"):
        load_tensors(folder, into, verified=True)
