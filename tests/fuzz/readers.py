"""All readers, registered by the modules that are imported here."""

from fuzz import checkpoint_files, model_files, other_files, run_records, token_files
from fuzz.reader import READERS, Reader

__all__ = ["READERS", "Reader", "checkpoint_files", "model_files", "other_files", "run_records", "token_files"]
