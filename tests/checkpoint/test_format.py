"""The format of docs/checkpoints.md: a reader written from that page alone, and a checkpoint of version 1 that stays
readable."""

import hashlib
import io
import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.conftest import bits
from checkpoint.destruction import hostile
from run_files import read_metrics

from gptlite.checkpoint.load import load_tensors, whole_tensors
from gptlite.checkpoint.manifest import DamagedCheckpoint, read_manifest, verify
from gptlite.checkpoint.metadata import boxes_of, read_metadata
from gptlite.config.saved import from_yaml
from gptlite.start.pretrain import pretrain

FIXTURE = Path(__file__).parent / "fixtures" / "v1" / "step-00000003"
# Of each tensor's bytes, row by row and little-endian, the first half of the SHA-256.
TENSORS = {
    "model.token_embedding.weight": "e8e9a7058ccdd7ddf430aa00194a50a2",
    "model.layers.0.attn.qkv.weight": "16cdc594507ef089f460932f36c84fcf",
    "model.layers.0.attn.proj.weight": "c283308829e63504ee0d46373f8ab102",
    "model.layers.0.mlp.up.weight": "7b47216924112bef339f061f7223fbe6",
    "model.layers.0.mlp.down.weight": "319ee9529507e9d7f40da6dcbe23ec45",
    "optim.token_embedding.weight.momentum_buffer": "06af8bfa85e828f4e5f2a3899923a32d",
    "optim.layers.0.attn.qkv.weight.momentum_buffer": "86336a58672215d6902369d82571a559",
    "optim.layers.0.attn.proj.weight.momentum_buffer": "238170279113322a1223e4f72527a85b",
    "optim.layers.0.mlp.up.weight.momentum_buffer": "18456a739495c2b671b092a6946209bc",
    "optim.layers.0.mlp.down.weight.momentum_buffer": "27feee95974a95338683ea8c0c522fed",
    "model.position_embedding.weight": "82d4d84aa06dd6b843b3eb33ba1a8218",
    "model.layers.0.attn_norm.weight": "d5a07152a1b866e4285f76b5987c0017",
    "model.layers.0.mlp_norm.weight": "41e2e5dbc4ef9a3fc9cfe57e3dd7f331",
    "model.final_norm.weight": "aeb32efa4ae544a7e86d3dafe7e7776b",
    "optim.position_embedding.weight.momentum_buffer": "1d31808c4ce12022cad7e1a172571129",
    "optim.layers.0.attn_norm.weight.momentum_buffer": "700da960e3355b75001a5a014cc0494f",
    "optim.layers.0.mlp_norm.weight.momentum_buffer": "8ef9125317606f3076bcf9cf45291210",
    "optim.final_norm.weight.momentum_buffer": "9489b119cda49770d68d49dfeb825b2b",
}
# The losses of steps 4 and 5 of the run it is from, had that not stopped.
LOSSES = [2.576528787612915, 2.5835180282592773]


# --- a reader of the format, from docs/checkpoints.md alone: no torch, nothing of gptlite ---

ITEM_SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}
STORAGE_DTYPE = {"FloatStorage": "float32", "BFloat16Storage": "bfloat16", "LongStorage": "int64"}


class Record:
    """Any object of a pickle: its class by name, what it was made from and its attributes."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


class NamesOnly(pickle.Unpickler):
    """Makes Records of whatever a pickle asks for; imports nothing. A storage stays the tuple that refers to it."""

    def find_class(self, module: str, name: str) -> type:
        return type(name, (Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_checkpoint(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """dtype, shape and bytes (row by row, little-endian) of every tensor. AssertionError where a rule is broken."""
    manifest = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))
    assert manifest["format_version"] == 1
    claimed = manifest.pop("sha256")
    canonical = json.dumps(manifest, sort_keys=True, separators=(", ", ": "), ensure_ascii=True)
    assert hashlib.sha256(canonical.encode("ascii")).hexdigest() == claimed
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert len(content) == entry["bytes"], name
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present == {*manifest["files"], "MANIFEST.json"}

    metadata = NamesOnly(io.BytesIO((folder / "data" / ".metadata").read_bytes())).load().state
    located = {}
    for index, info in metadata["storage_data"].items():
        key = index.state["fqn"], tuple(index.state["offset"].args[0])
        assert key not in located
        assert info.state.get("transform_descriptors") is None
        located[key] = info.state["relative_path"], info.state["offset"], info.state["length"]
    entries = metadata["state_dict_metadata"]
    assert set(entries) == set(manifest["tensors"])
    return {
        key: read_tensor(folder, key, entries[key].state, located, each) for key, each in manifest["tensors"].items()
    }


def read_tensor(folder: Path, key: str, entry: Any, located: Any, told: Any) -> tuple[str, list[int], bytes]:
    shape, dtype = list(entry["size"].args[0]), told["dtype"]
    assert shape == told["shape"]
    assert entry["properties"].state[0].__name__ == dtype
    size = ITEM_SIZE[dtype]
    whole = np.zeros([*shape, size], np.uint8)
    covered = np.zeros(shape, np.int64)
    for chunk in entry["chunks"]:
        offset, sizes = (tuple(chunk.state[name].args[0]) for name in ("offsets", "sizes"))
        path, position, length = located[key, offset]
        with open(folder / "data" / path, "rb") as file:
            file.seek(position)
            box = read_item(file.read(length), dtype, list(sizes))
        where = tuple(slice(start, start + count) for start, count in zip(offset, sizes, strict=True))
        whole[where] = box
        covered[where] += 1
    assert (covered == 1).all()
    return dtype, shape, whole.tobytes()


def read_item(content: bytes, dtype: str, sizes: list[int]) -> np.ndarray:
    """uint8[*sizes, item size] of one item: a zip archive with data.pkl, byteorder and data/0."""
    records = read_records(content)
    assert records["byteorder"] == b"little"
    tensor = NamesOnly(io.BytesIO(records["data.pkl"])).load()
    (_, storage, name, _, count), start, shape, stride = tensor.args[:4]
    assert STORAGE_DTYPE[storage.__name__] == dtype
    assert list(shape) == sizes
    size = ITEM_SIZE[dtype]
    raw = np.frombuffer(records[f"data/{name}"], np.uint8)
    assert len(raw) == count * size
    strides = [*(step * size for step in stride), 1]
    return np.lib.stride_tricks.as_strided(raw[start * size :], [*sizes, size], strides)


def read_records(content: bytes) -> dict[str, bytes]:
    """The records of a zip archive, without their common folder. zipfile would compare CRC-32s, which may be wrong."""
    records = {}
    for info in zipfile.ZipFile(io.BytesIO(content)).infolist():
        assert info.compress_type == zipfile.ZIP_STORED
        name_length, extra_length = struct.unpack_from("<HH", content, info.header_offset + 26)
        start = info.header_offset + 30 + name_length + extra_length
        records[info.filename.partition("/")[2]] = content[start : start + info.file_size]
    return records


# --- the tests ---


def test_the_page_is_enough_to_read_a_checkpoint_bit_for_bit(save, tensors):
    read = read_checkpoint(save(7))
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key] == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits(tensor)), key


def test_version_1_verifies_and_reads_as_it_did():
    """By the page, and by gptlite."""
    manifest = verify(FIXTURE, print)
    assert (manifest.format_version, manifest.meta["step"], manifest.environment["layout"]) == (1, 3, "tensor 2")
    assert {"data/__0_0.distcp", "data/__1_0.distcp"} <= manifest.files.keys()
    metadata = read_metadata(FIXTURE, manifest)
    assert sum(len(boxes_of(metadata, key)) for key in TENSORS) == 28
    read = whole_tensors(FIXTURE, print)
    ours = {key: bits(read(key)) for key in manifest.tensors}
    assert {key: hashlib.sha256(content).hexdigest()[:32] for key, content in ours.items()} == TENSORS
    assert {key: content for key, (_, _, content) in read_checkpoint(FIXTURE).items()} == ours


def test_training_goes_on_from_version_1(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(FIXTURE, run / "checkpoints" / FIXTURE.name)
    config = from_yaml((FIXTURE / "config.yaml").read_text())
    config.run.dir, config.trainer.max_steps, config.parallelism.tensor = str(run), 5, 1
    config.data.cache_dir = str(tmp_path / "cache")
    assert pretrain(config).exit_code == 0
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == [4, 5]
    assert [row["loss"] for row in rows] == pytest.approx(LOSSES, rel=1e-5)
    assert verify(run / "checkpoints" / "step-00000005", print).meta["consumed_samples"] == 10


def test_a_version_to_come_is_refused_with_what_to_do(tmp_path):
    folder = shutil.copytree(FIXTURE, tmp_path / FIXTURE.name)
    hostile.edit_manifest(folder, lambda manifest: manifest.update(format_version=2, something_new={"a": 1}))
    for read in (read_manifest, lambda path: load_tensors(path, {})):
        with pytest.raises(DamagedCheckpoint) as error:
            read(folder)
        words = "its format_version is 2, but this gptlite reads 1: update gptlite; use another one"
        assert str(error.value) == f"checkpoint {folder} cannot be used: {words}"
