"""Names and checks of prepared folders, which hold the data of a run: tokenizer/, train.bin/.idx, val.bin/.idx."""

from pathlib import Path

from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.tokenizers.base import Tokenizer

TRAIN, VALIDATION, TOKENIZER = "train", "val", "tokenizer"


def open_split(folder: Path, split: str, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a split of a prepared folder. Raises ConfigError if it is damaged or was written with another tokenizer."""
    dataset = IndexedDataset(folder / split)
    if dataset.meta is None:
        raise ConfigError(
            f"{folder / split}.meta.json, which identifies the tokenizer, does not exist; make a prepared folder with "
            f"{command('data')} import"
        )
    if dataset.meta.tokenizer != tokenizer.fingerprint:
        raise ConfigError(f"{folder / split}.bin was not written with the tokenizer beside it; prepare {folder} again")
    return dataset


def require_length(
    num_train: int, num_validation: int, sequence_length: int, folder: Path | str, num_documents: int | None = None
) -> None:
    """Raise ConfigError unless there is at least one sequence to train on and one target to evaluate on.

    `num_documents` of both splits is given for a folder in which each document is in one of them as a whole.
    """
    if num_documents == 1 and min(num_train, num_validation) == 0:
        raise ConfigError(
            f"data: {folder} has one document, which is in one split as a whole, so the other is empty; prepare it "
            f"again from more documents, such as paragraphs ({command('preprocess')} ... separator=blank), or train on "
            "a text file itself with data=text, which holds out its end"
        )
    if num_train <= sequence_length:
        raise ConfigError(
            f"data.sequence_length={sequence_length} needs more than {sequence_length} training tokens, "
            f"but {folder} has {num_train}; lower it, or give more text"
        )
    if num_validation < 2:
        raise ConfigError(
            f"data: the held-out text in {folder} has fewer than two tokens; give more text, or hold out more of it "
            f"(data.validation_fraction for a text file, validation_fraction= of {command('preprocess')} for a folder)"
        )
