"""A checkpoint of an attacker runs nothing, whatever is in it: one line says why it is refused."""

import copyreg
import io
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
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
        payloads: Mapping[str, bytes],
        place: Callable[[Path, bytes], object],
        expected: type[ConfigError] = DamagedCheckpoint,
    ) -> dict[str, str]:
        """What was not refused as it should be once `place` has put it into the folder, by payload."""
        return {name: words for name, content in payloads.items() if (words := self._try(content, place, expected))}

    def _try(self, content: bytes, place: Callable[[Path, bytes], object], expected: type[ConfigError]) -> str:
        shutil.rmtree(self.path)
        shutil.copytree(self.intact, self.path)
        place(self.path, content)
        words = self.load(expected)
        return f"IT RAN; {words}" if self.ran() else words

    def load(self, expected: type[ConfigError] = DamagedCheckpoint) -> str:
        """What loading comes to; empty where it is refused in a line."""
        into: dict[str, Tensor] = {key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()}
        try:
            load_tensors(self.path, into, log=quiet)
        except expected as error:
            line = str(error)
            return "" if "\n" not in line and len(line) < 1000 else f"many words: {line[:300]}"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:300]
        return "loaded"

    def ran(self) -> bool:
        """Whether a payload has run since the last time."""
        if there := self.canary.exists():
            self.canary.rmdir() if self.canary.is_dir() else self.canary.unlink()
        return there


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(tmp_path)
    assert victim.load() == "loaded"
    copyreg.add_extension(*hostile.EXTENSION)
    yield victim
    copyreg.remove_extension(*hostile.EXTENSION)


def test_the_payloads_would_run(victim):
    """Read without care they do, or the tests below would prove nothing."""
    metadata = hostile.metadata_payloads(victim.canary, victim.metadata)
    ran = {"metadata": 0, "item": 0}
    for content in metadata.values():
        with suppress(BaseException):
            pickle.loads(content)
        ran["metadata"] += victim.ran()
    for content in hostile.item_payloads(victim.canary).values():
        with suppress(BaseException):
            torch.load(io.BytesIO(content), weights_only=False)
        ran["item"] += victim.ran()
    assert ran["metadata"] >= 30
    assert ran["item"] >= 15


def test_no_metadata_runs_code(victim):
    payloads = hostile.metadata_payloads(victim.canary, victim.metadata)
    assert victim.try_all(payloads, lambda path, content: hostile.replace(path, "data/.metadata", content)) == {}
    assert len(payloads) >= 55


def test_no_stored_tensor_runs_code(victim):
    payloads = hostile.item_payloads(victim.canary)
    assert victim.try_all(payloads, lambda path, content: hostile.replace_item(path, "w", content)) == {}
    assert len(payloads) >= 30


def test_no_manifest_is_believed(victim):
    for name, edit in hostile.manifest_edits().items():
        wrong = victim.try_all({name: b""}, lambda path, _, edit=edit: hostile.edit_manifest(path, edit), ConfigError)
        assert wrong == {}


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"sha256": 1}', b"\xff\xfe", b"null", b"1" * 5000, b"[]"])
def test_a_manifest_of_anything_is_refused(victim, content):
    assert victim.try_all({"": content}, lambda path, _: (path / "MANIFEST.json").write_bytes(content)) == {}
