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
from gptlite.config import from_yaml
from gptlite.pretrain import pretrain

FIXTURE = Path(__file__).parent / "fixtures" / "v1" / "step-00000003"
# SHA-256 of each tensor's bytes, row by row and little-endian.
TENSORS = {
    "model.token_embedding.weight":
        "e8e9a7058ccdd7ddf430aa00194a50a29f5d8421ab8ebc920f162b8ae02571b2",
    "model.layers.0.attn.qkv.weight":
        "16cdc594507ef089f460932f36c84fcff99bc84fd3df2cf4133b6f2824c613d8",
    "model.layers.0.attn.proj.weight":
        "c283308829e63504ee0d46373f8ab102e00fa62b86f2016ec8745de83b922131",
    "model.layers.0.mlp.up.weight":
        "7b47216924112bef339f061f7223fbe6b693dc09921f38f8bf0b449d99b12d18",
    "model.layers.0.mlp.down.weight":
        "319ee9529507e9d7f40da6dcbe23ec45bd249aacefa68afc0f279879b2da4ea7",
    "optim.token_embedding.weight.momentum_buffer":
        "06af8bfa85e828f4e5f2a3899923a32d70d75e08dfa914ec71f065494a783977",
    "optim.layers.0.attn.qkv.weight.momentum_buffer":
        "86336a58672215d6902369d82571a5590a24a07027807522efa61e6be6b640ad",
    "optim.layers.0.attn.proj.weight.momentum_buffer":
        "238170279113322a1223e4f72527a85b038307c3992d24d495ff6995b6891e63",
    "optim.layers.0.mlp.up.weight.momentum_buffer":
        "18456a739495c2b671b092a6946209bc06bfc5c24a1ba9e8d2f153e8083c7ecb",
    "optim.layers.0.mlp.down.weight.momentum_buffer":
        "27feee95974a95338683ea8c0c522fed1febc6c0d1c681a6fd49335e87ce1321",
    "model.position_embedding.weight":
        "82d4d84aa06dd6b843b3eb33ba1a8218e3283e598baf0c40da6508d04bb0e68a",
    "model.layers.0.attn_norm.weight":
        "d5a07152a1b866e4285f76b5987c00173900e65a0538f162aeb5e1ebb71fb018",
    "model.layers.0.mlp_norm.weight":
        "41e2e5dbc4ef9a3fc9cfe57e3dd7f331930cbaacb9895921db02fc0d3ba01c84",
    "model.final_norm.weight":
        "aeb32efa4ae544a7e86d3dafe7e7776b5f85db18138fd6adaaf097d9ccecb859",
    "optim.position_embedding.weight.momentum_buffer":
        "1d31808c4ce12022cad7e1a1725711296de41df67c77c290736360ee4da4c5f5",
    "optim.layers.0.attn_norm.weight.momentum_buffer":
        "700da960e3355b75001a5a014cc0494fdd56aa3a777b8f48d4935c2030dbbae1",
    "optim.layers.0.mlp_norm.weight.momentum_buffer":
        "8ef9125317606f3076bcf9cf4529121065415f0b39f9d649d1c2001153bf731b",
    "optim.final_norm.weight.momentum_buffer":
        "9489b119cda49770d68d49dfeb825b2bdc0b273a173ac120685829da6f5aafb9",
}  # fmt: skip
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


def test_the_page_is_enough_to_read_what_two_ranks_wrote():
    digests = {key: hashlib.sha256(content).hexdigest() for key, (_, _, content) in read_checkpoint(FIXTURE).items()}
    assert digests == TENSORS


def test_version_1_verifies_and_reads_as_it_did():
    manifest = verify(FIXTURE, print)
    assert (manifest.format_version, manifest.meta["step"], manifest.environment["layout"]) == (1, 3, "tensor 2")
    assert sorted(name for name in manifest.files if name.endswith(".distcp")) == [
        "data/__0_0.distcp",
        "data/__1_0.distcp",
    ]
    metadata = read_metadata(FIXTURE, manifest)
    assert sum(len(boxes_of(metadata, key)) for key in TENSORS) == 28
    read = whole_tensors(FIXTURE, print)
    digests = {key: hashlib.sha256(bits(read(key))).hexdigest() for key in manifest.tensors}
    assert digests == TENSORS


def test_training_goes_on_from_version_1(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(FIXTURE, run / "checkpoints" / FIXTURE.name)
    config = from_yaml((FIXTURE / "config.yaml").read_text())
    config.run.dir, config.trainer.max_steps, config.parallelism.tensor = str(run), 5, 1
    config.data.cache_dir = str(tmp_path / "cache")
    assert pretrain(config) == 0
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
        line = str(error.value)
        assert "format_version is 2" in line
        assert "this gptlite reads 1" in line
        assert "take another" in line
        assert "\n" not in line
