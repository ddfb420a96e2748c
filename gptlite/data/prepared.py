"""Opened prepared folders: the tokens of a run, from one data set or a blend."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.data.batch_loader import Share
from gptlite.data.batches import BatchSchedule
from gptlite.data.config import DataConfig
from gptlite.data.folder import TOKENIZER, TRAIN, VALIDATION, open_split, require_length
from gptlite.data.loader import HeldOut, Loader
from gptlite.data.opened import Identity, OpenedData
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError
from gptlite.parallelism.axes import CONTEXT
from gptlite.parallelism.layout import chunk_starts
from gptlite.parallelism.mesh import Mesh
from gptlite.tokenizers.base import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TokenSet:
    """Tokens of a data set, int[N], memory-mapped if they come from a folder.

    `data` is the SHA-256 of the training tokens, which is also the key of the sample order. `weight` is relative to the
    weights of the other sets in a blend. `validation_bytes` is the size of the held-out text; None if it is not text,
    or if the pieces of its tokens are its bytes.
    """

    name: str
    data: str
    train: np.ndarray
    validation: np.ndarray
    weight: float = 1.0
    validation_bytes: int | None = None


@dataclass(frozen=True)
class PreparedData(OpenedData):
    """Tokens of a run and their tokenizer."""

    name: str
    folder: Path | None  # None for a blend, and for synthetic data in memory
    tokenizer: Tokenizer
    sets: tuple[TokenSet, ...]
    identity: Identity

    @property
    def num_train_tokens(self) -> int:
        """Number of training tokens, including EOD tokens."""
        return sum(len(each.train) for each in self.sets)

    def num_samples(self, sequence_length: int) -> int:
        """Return the number of training sequences in an epoch, summed over the sets of a blend."""
        return sum((len(each.train) - 1) // sequence_length for each in self.sets)

    @property
    def num_validation_tokens(self) -> int:
        """Number of held-out tokens, including EOD tokens."""
        return sum(len(each.validation) for each in self.sets)

    def describe(self) -> str:
        """Return a one-line summary: token counts, tokenizer, and the folder or the fractions of a blend."""
        where = f", in {self.folder}" if self.folder else ""
        if len(self.sets) > 1:
            total = sum(each.weight for each in self.sets)
            where = "; " + ", ".join(f"{each.name} {each.weight / total:.4g}" for each in self.sets)
        return (
            f"{self.name}: {self.num_train_tokens:,} training and {self.num_validation_tokens:,} held-out tokens, "
            f"{self.tokenizer.kind} vocabulary of {self.tokenizer.vocab_size}{where}"
        )

    def loader(
        self, config: DataConfig, schedule: BatchSchedule, micro_batch_size: int, mesh: Mesh, seed: int
    ) -> Loader:
        """Return this rank's loader of sequences."""
        length = config.sequence_length
        held_out = HeldOut(
            {each.name: each.validation for each in self.sets},
            self.tokenizer.token_bytes(),
            {each.name: each.validation_bytes for each in self.sets},
        )
        return Loader(
            SampleStream.begin(seed, length, {each.name: (each.data, each.train, each.weight) for each in self.sets}),
            held_out,
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            device=mesh.device,
            share=Share(mesh.data_rank, mesh.data_size, _positions(length, mesh)),
            document_end=self.tokenizer.eod if config.documents else None,
        )


def _positions(length: int, mesh: Mesh) -> np.ndarray | None:
    """Return the positions in a sequence that this rank holds under context parallelism; None for all."""
    ranks = mesh.size(CONTEXT)
    if ranks == 1:
        return None
    chunk = np.arange(length // (2 * ranks))
    return np.concatenate([start + chunk for start in chunk_starts(length, ranks, mesh.coordinate(CONTEXT))])


def make_identity(corpus: str, tokenizer: Tokenizer, sequence_length: int, **tokens: Any) -> Identity:
    """Return the identity of data. `tokens` are SHA-256 hashes: train= and validation=, or folders={folder: hashes}."""
    about = {"corpus": corpus, "tokenizer": tokenizer.fingerprint, "sequence_length": str(sequence_length)}
    return about | tokens


def open_folder(folder: Path, name: str, sequence_length: int, source: str) -> PreparedData:
    """Open a prepared folder. Raises ConfigError if it is damaged, or if its text, which the message calls `source`, is
    shorter than a sequence."""
    tokenizer, only, hashes = _open(folder, name, 1.0, sequence_length, source)
    return PreparedData(name, folder, tokenizer, (only,), make_identity(name, tokenizer, sequence_length, **hashes))


def open_blend(blend: Mapping[str, float], sequence_length: int, beside: str | None = None) -> PreparedData:
    """Open the prepared folders of `blend`, {folder: weight}.

    Raises ConfigError if a folder is damaged or its text is shorter than a sequence, if two folders hold the same
    tokens, or if tokenizers differ. The tokenizer of `beside`, a further prepared folder, must match too.
    """
    sets: list[TokenSet] = []
    hashes: dict[str, dict[str, str]] = {}
    tokenizer, first = None, ""
    if beside is not None:
        tokenizer, first = load_tokenizer(Path(beside).expanduser() / TOKENIZER), beside
    for name, weight in blend.items():
        its, token_set, hashes[name] = _open(Path(name).expanduser(), name, weight, sequence_length)
        tokenizer, first = (its, name) if tokenizer is None else (tokenizer, first)
        if its.fingerprint != tokenizer.fingerprint:
            words = [f"{each.kind} vocabulary of {each.vocab_size}" for each in (its, tokenizer)]
            raise ConfigError(
                f"data.blend: {name} has another tokenizer ({words[0]}) than {first} ({words[1]}); "
                "prepare both with the same tokenizer"
            )
        if same := next((other for other in sets if other.data == token_set.data), None):
            raise ConfigError(f"data.blend: {name} has the same tokens as {same.name}; keep one, and add the weights")
        sets.append(token_set)
    assert tokenizer is not None
    identity = make_identity("tokens", tokenizer, sequence_length, folders=hashes)
    only = sets[0].name if len(sets) == 1 else None
    folder = Path(only).expanduser() if only else None
    return PreparedData(only or "blend", folder, tokenizer, tuple(sets), identity)


def _open(
    folder: Path, name: str, weight: float, sequence_length: int, source: str | None = None
) -> tuple[Tokenizer, TokenSet, dict[str, str]]:
    """Open a folder; return its tokenizer, its tokens, and the SHA-256 hashes of training and held-out tokens."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    train, validation = opened = [open_split(folder, part, tokenizer) for part in (TRAIN, VALIDATION)]
    documents = train.num_documents + validation.num_documents if source is None else None
    require_length(len(train.tokens), len(validation.tokens), sequence_length, source or folder, documents)
    hashes = {part: each.meta.sha256 for part, each in zip(("train", "validation"), opened, strict=True) if each.meta}
    size = None if tokenizer.keeps_bytes or validation.meta is None else validation.meta.text_bytes
    return tokenizer, TokenSet(name, hashes["train"], train.tokens, validation.tokens, weight, size), hashes
