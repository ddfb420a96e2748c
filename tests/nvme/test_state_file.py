"""A file's mapped tensor: what is read past the mapping, and what of it stays in memory."""

from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed.cells.file_pages import cached_bytes

from gptlite.parallelism.in_files import changed, read_once
from gptlite.satellites.nvme.state_file import MAPPED, StateFile

SIZE = 4 * MAPPED


@pytest.mark.parametrize("direct", [True, False])
def test_a_tensor_is_read_past_the_mapping(tmp_path: Path, direct: bool):
    with ExitStack() as stack:
        if not direct:
            stack.enter_context(mock.patch.object(StateFile, "_make_direct", return_value=False))
        file = StateFile(tmp_path, SIZE)
    mapped = file.mapped()
    mapped.copy_(torch.arange(SIZE // 4))
    views = mapped[5:5], mapped[1000:5000], mapped[3:24].view(3, 7)[:, 2:5], mapped[-1:], mapped[8].view(())
    expected = [view.clone() for view in views]
    # Not flushed: what the mapping has is what is read.
    assert all(torch.equal(read_once(view), values) for view, values in zip(views, expected, strict=True))
    file.flush()
    assert cached_bytes(mapped) == 0
    copies = [read_once(view) for view in views]
    assert all(map(torch.equal, copies, expected))
    assert cached_bytes(mapped) == 0
    copies[1].fill_(0)
    assert mapped[1000] == 1000


def test_changes_are_written_and_leave_memory(tmp_path: Path):
    file = StateFile(tmp_path, SIZE)
    mapped, piece = file.mapped(), MAPPED // 8
    for number, part in enumerate(mapped.split(piece)):
        part.fill_(number)
        changed(part)
    assert cached_bytes(mapped) == 0
    assert torch.equal(read_once(mapped), torch.arange(SIZE // 4 // piece).repeat_interleave(piece).float())


def test_tensors_in_memory_are_left_alone():
    tensor = torch.ones(3)
    changed(tensor)
    assert read_once(tensor) is tensor
