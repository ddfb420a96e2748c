"""Prepared folders, opened: the tokens of a run, of one data set or of a blend of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlite.data.corpus import TOKENIZER, TRAIN, VALIDATION, open_split, require_length
from gptlite.data.indexed import IndexedDataset
from gptlite.data.tokenizer import Tokenizer, load_tokenizer
from gptlite.errors import ConfigError


@dataclass(frozen=True)
class TokenSet:
    """Tokens ready to be read, int[N], memory-mapped where they come from a folder.

    `data` is the SHA-256 of the training tokens: it keys their order. `weight` is its part in a blend.
    """

    name: str
    data: str
    train: np.ndarray
    validation: np.ndarray
    weight: float = 1.0


@dataclass(frozen=True)
class PreparedData:
    """What a run reads, and the tokenizer that made it. `identity` is what makes it the same data at resume."""

    name: str
    folder: Path | None  # None: a blend of several, or made up in memory
    tokenizer: Tokenizer
    sets: tuple[TokenSet, ...]
    identity: dict[str, str | dict[str, dict[str, str]]]

    @property
    def train(self) -> np.ndarray:
        """Training tokens of the first data set."""
        return self.sets[0].train

    @property
    def validation(self) -> np.ndarray:
        """Held-out tokens of the first data set."""
        return self.sets[0].validation

    @property
    def num_train_tokens(self) -> int:
        """Tokens to train on, ends of documents included."""
        return sum(len(each.train) for each in self.sets)

    @property
    def num_validation_tokens(self) -> int:
        """Held-out tokens, ends of documents included."""
        return sum(len(each.validation) for each in self.sets)

    def describe(self) -> str:
        """One line for people."""
        where = f", in {self.folder}" if self.folder else ""
        if len(self.sets) > 1:
            total = sum(each.weight for each in self.sets)
            where = "; " + ", ".join(f"{each.name} {each.weight / total:.4g}" for each in self.sets)
        return (
            f"{self.name}: {self.num_train_tokens:,} training and {self.num_validation_tokens:,} held-out tokens, "
            f"{self.tokenizer.kind} vocabulary of {self.tokenizer.vocab_size}{where}"
        )


def open_folder(folder: Path, name: str, sequence_length: int) -> PreparedData:
    """The data of a corpus in its prepared folder. ConfigError where it is damaged or shorter than a sequence."""
    tokenizer, train, validation = _open(folder, sequence_length)
    identity: dict[str, str | dict[str, dict[str, str]]] = {
        "corpus": name,
        "tokenizer": tokenizer.fingerprint,
        "train": _sha256(train),
        "validation": _sha256(validation),
        "sequence_length": str(sequence_length),
    }
    only = TokenSet(name, _sha256(train), train.tokens, validation.tokens)
    return PreparedData(name, folder, tokenizer, (only,), identity)


def open_blend(blend: Mapping[str, float], sequence_length: int, beside: str | None = None) -> PreparedData:
    """The data of prepared folders, one or several, by weight.

    ConfigError where one is damaged or shorter than a sequence, where two are the same, and where tokenizers differ,
    that of the folder `beside` included.
    """
    sets: list[TokenSet] = []
    identities: dict[str, dict[str, str]] = {}
    tokenizer, first = None, ""
    if beside is not None:
        tokenizer, first = load_tokenizer(Path(beside).expanduser() / TOKENIZER), beside
    for name, weight in blend.items():
        its, train, validation = _open(Path(name).expanduser(), sequence_length)
        tokenizer, first = (its, name) if tokenizer is None else (tokenizer, first)
        if its.fingerprint != tokenizer.fingerprint:
            words = [f"{each.kind} vocabulary of {each.vocab_size}" for each in (its, tokenizer)]
            raise ConfigError(
                f"data.blend: {name} has another tokenizer ({words[0]}) than {first} ({words[1]}); "
                "prepare both with the same one"
            )
        data = _sha256(train)
        if same := next((each for each in sets if each.data == data), None):
            raise ConfigError(f"data.blend: {name} holds the same tokens as {same.name}; give one, with both weights")
        sets.append(TokenSet(name, data, train.tokens, validation.tokens, weight))
        identities[name] = {"train": data, "validation": _sha256(validation)}
    assert tokenizer is not None
    identity: dict[str, str | dict[str, dict[str, str]]] = {
        "corpus": "tokens",
        "tokenizer": tokenizer.fingerprint,
        "folders": identities,
        "sequence_length": str(sequence_length),
    }
    if len(sets) == 1:
        return PreparedData(sets[0].name, Path(sets[0].name).expanduser(), tokenizer, tuple(sets), identity)
    return PreparedData("blend", None, tokenizer, tuple(sets), identity)


def _open(folder: Path, sequence_length: int) -> tuple[Tokenizer, IndexedDataset, IndexedDataset]:
    tokenizer = load_tokenizer(folder / TOKENIZER)
    train, validation = (open_split(folder, part, tokenizer) for part in (TRAIN, VALIDATION))
    require_length(len(train.tokens), len(validation.tokens), sequence_length, folder)
    return tokenizer, train, validation


def _sha256(dataset: IndexedDataset) -> str:
    assert dataset.meta is not None
    return dataset.meta.sha256
