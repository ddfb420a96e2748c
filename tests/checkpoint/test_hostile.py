"""A checkpoint of an attacker runs nothing, whatever is in it: one line says why it is refused."""

import copyreg
import io
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoint.destruction import hostile
from checkpoint.destruction.campaign import quiet
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import DamagedCheckpoint
from gptlite.errors import ConfigError


class Victim:
    """A checkpoint that is made anew for each payload, and what loading it comes to."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {"w": torch.arange(6.0), "deep.weight": torch.ones(3, 4), "step": torch.tensor(1.0)}
        self.checkpointer = Checkpointer(CheckpointConfig(keep=0), folder / "run")
        self.path = self.checkpointer.save(dict(self.tensors), {"step": 1}, "seed: 1\n", None, quiet)
        self.intact = Path(shutil.copytree(self.path, folder / "intact"))
        shutil.copytree(self.path, self.path.with_name("other"))
        self.canary = folder / "canary"
        self.metadata = (self.path / "data" / ".metadata").read_bytes()

    def try_all(
        self,
        payloads: dict[str, bytes],
        place: Callable[[bytes], None],
        expected: type[ConfigError] = DamagedCheckpoint,
    ):
        """What was not refused as it should be, by payload."""
        return {name: words for name, content in payloads.items() if (words := self._try(content, place, expected))}

    def _try(self, content: bytes, place: Callable[[bytes], None], expected: type[ConfigError]) -> str:
        shutil.rmtree(self.path)
        shutil.copytree(self.intact, self.path)
        place(content)
        words = self._load(expected)
        if self.canary.exists():
            self.clean()
            return f"IT RAN; {words}"
        return words

    def _load(self, expected: type[ConfigError]) -> str:
        into: dict[str, Tensor] = {key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()}
        try:
            load_tensors(self.path, into, log=quiet)
        except expected as error:
            line = str(error)
            return "" if "\n" not in line and len(line) < 1000 else f"many words: {line[:300]}"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:300]
        return "loaded"

    def clean(self) -> None:
        self.canary.rmdir() if self.canary.is_dir() else self.canary.unlink()


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    victim = Victim(tmp_path)
    assert victim._load(DamagedCheckpoint) == "loaded"
    return victim


def in_metadata(victim: Victim) -> Callable[[bytes], None]:
    return lambda content: hostile.replace(victim.path, "data/.metadata", content)


def in_item(victim: Victim) -> Callable[[bytes], None]:
    return lambda content: hostile.replace_item(victim.path, "w", content)


def test_the_payloads_would_run(victim):
    """Read without care they do, or the tests below would prove nothing."""
    ran = set()
    copyreg.add_extension(*hostile.EXTENSION)
    try:
        for name, content in hostile.metadata_payloads(victim.canary, victim.metadata).items():
            with suppress(BaseException):
                pickle.loads(content)
            if victim.canary.exists():
                ran.add(name)
                victim.clean()
        for name, content in hostile.item_payloads(victim.canary).items():
            with suppress(BaseException):
                torch.load(io.BytesIO(content), weights_only=False)
            if victim.canary.exists():
                ran.add(f"item: {name}")
                victim.clean()
    finally:
        copyreg.remove_extension(*hostile.EXTENSION)
    assert len([name for name in ran if not name.startswith("item")]) >= 30, sorted(ran)
    assert len([name for name in ran if name.startswith("item")]) >= 15, sorted(ran)


def test_no_metadata_runs_code(victim):
    payloads = hostile.metadata_payloads(victim.canary, victim.metadata)
    copyreg.add_extension(*hostile.EXTENSION)
    try:
        assert victim.try_all(payloads, in_metadata(victim)) == {}
    finally:
        copyreg.remove_extension(*hostile.EXTENSION)
    assert len(payloads) >= 55


def test_no_stored_tensor_runs_code(victim):
    payloads = hostile.item_payloads(victim.canary)
    assert victim.try_all(payloads, in_item(victim)) == {}
    assert len(payloads) >= 30


def test_no_manifest_is_believed(victim, tmp_path):
    wrong = {}
    for name, edit in hostile.manifest_edits().items():
        found = victim.try_all({name: b""}, lambda _, edit=edit: hostile.edit_manifest(victim.path, edit), ConfigError)
        wrong |= found
    assert wrong == {}


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"sha256": 1}', b"\xff\xfe", b"null", b"1" * 5000, b"[]"])
def test_a_manifest_of_anything_is_refused(victim, content):
    assert victim.try_all({"": content}, (victim.path / "MANIFEST.json").write_bytes) == {}
