"""Disk space of a checkpoint, known before it is written."""

import io
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from gptlite.checkpoint.parts import Parts

BLOCK = 4096  # bytes: file systems allocate whole blocks, and one for a folder
FOLDERS = 4  # of a step: itself, data, tokenizer, and one of another kind
# Bytes of an entry in torch's data/.metadata and of one in MANIFEST.json, as of torch 2.13, without the names in it.
OF_KEY, OF_BOX, OF_FILE, OF_ENVIRONMENT = 70, 150, 140, 1000
VARIANCE = 80  # bytes by which the file of a tensor depends on its dtype and its sizes


def disk_bytes(parts: Parts, meta: dict[str, Any], small_files: Iterable[int]) -> int:
    """Return an upper bound of the bytes on disk of a checkpoint with the tensors of all ranks.

    `small_files` has the sizes of its files other than tensors, metadata and manifest. Raises TypeError if `meta` is
    not JSON.
    """
    small = list(small_files)
    tensors = parts.total_bytes + parts.boxes * _of_box()
    metadata = sum(OF_KEY + len(key.encode()) for key in parts.described) + parts.boxes * OF_BOX
    files = parts.writers + len(small) + 2  # and the two below
    manifest = len(json.dumps({"meta": meta, "tensors": parts.described}, indent=1)) + OF_ENVIRONMENT + OF_FILE * files
    return tensors + metadata + manifest + sum(small) + BLOCK * (files + FOLDERS)


@cache
def _of_box() -> int:
    """Return the bytes that torch adds to the elements of a tensor."""
    file = io.BytesIO()
    torch.save(torch.zeros(()), file)
    return len(file.getvalue()) + VARIANCE
