"""State that passes through buffers from a file and back is what it is in memory, to the bit, whatever the chunks."""

import gc
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gptlite.optimizer.state import optimizer_state, take_optimizer_state
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.satellites.monitor.model_state import state_of, storage_sizes
from gptlite.satellites.nvme.errors import OffloadFailed
from gptlite.satellites.nvme.state_file import ALIGN, StateFile
from gptlite.satellites.nvme.streamed import StateStream, stream_state
from gptlite.satellites.optimizers.lion import Lion
from gptlite.trainer.banner import offload_words

SHAPES = [(5000,), (3,), (64, 65), (1024,), (2, 1024), (0,), (7000,)]
KINDS = {
    "adamw": lambda groups: AdamW(groups, lr=1e-2, fused=True),
    "adam": lambda groups: Adam(groups, lr=1e-2, foreach=True),
    "sgd": lambda groups: SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "lion": lambda groups: Lion(groups, {"lr": 1e-2, "betas": (0.95, 0.98)}),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def built(kind: str) -> tuple[list[nn.Parameter], Optimizer]:
    ours = parameters()
    names = [f"p{index}" for index in range(len(ours))]
    groups = [
        {"params": ours[::2], "names": names[::2], "weight_decay": 0.1},
        {"params": ours[1::2], "names": names[1::2], "weight_decay": 0.0},
    ]
    return ours, KINDS[kind](groups)


def set_gradients(ours: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(ours):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if (index, step) == (3, 1) else gradient  # one that has none for once


def tensors_of(ours: list[nn.Parameter], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {f"value {index}": parameter.detach().clone() for index, parameter in enumerate(ours)}
    return found | {key: value.clone() for key, value in optimizer_state(optimizer).items()}


class Pair:
    """An optimizer whose state is in memory, and one whose state passes through buffers of so many pages."""

    def __init__(self, kind: str, folder: Path, pages: int) -> None:
        self.plain, (ours, optimizer) = built(kind), built(kind)
        self.streamed = ours, stream_state(optimizer, folder, pages * ALIGN)

    def step(self, number: int, lr: float = 1e-2) -> None:
        for parameters_, each in (self.plain, self.streamed):
            set_gradients(parameters_, number)
            for group in each.param_groups:
                group["lr"] = lr
            each.step()

    def assert_same(self) -> None:
        expected, found = tensors_of(*self.plain), tensors_of(*self.streamed)
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [2, 6, 8, 12, 1000])  # of each buffer; the state has 21 or 42
def test_steps_are_the_same_to_the_bit_whatever_the_chunks(kind: str, pages: int, tmp_path: Path):
    pair = Pair(kind, tmp_path, pages)
    assert os.listdir(tmp_path) == []  # the file has no name
    for step in range(7):
        pair.step(step, 1e-2 / (1 + step))
        if step in (2, 3, 6):  # as a checkpoint is written, or not
            pair.assert_same()


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_what_a_checkpoint_writes_into_the_state_is_what_the_next_step_takes(kind: str, tmp_path: Path):
    """Between steps, when two chunks are in the buffers already."""
    pair = Pair(kind, tmp_path, 6)
    for step in range(4):
        pair.step(step)
        for _, each in (pair.plain, pair.streamed):
            tensors = optimizer_state(each)
            for index, tensor in enumerate(tensors.values()):
                tensor.copy_(torch.full_like(tensor, 0.5 + index + step))
            take_optimizer_state(each, tensors)
    pair.assert_same()


def test_two_buffers_are_all_that_is_in_memory(tmp_path: Path):
    _, optimizer = built("adamw")
    optimizer = stream_state(optimizer, tmp_path, 6 * ALIGN)
    held = sum(storage_sizes(state_of(optimizer)).values())
    numbers = 4 * len(SHAPES)
    assert held - numbers <= 2 * 6 * ALIGN
    stream: StateStream = optimizer.stream  # type: ignore[attr-defined]
    assert stream.file.size == 2 * 21 * ALIGN


def test_memory_stays_within_two_buffers_while_steps_are_taken(tmp_path: Path):
    """64 MiB of state through two buffers of 2 MiB: the process grows by the buffers, not by the state."""
    parameter = nn.Parameter(torch.zeros(2**23))
    optimizer = AdamW([{"params": [parameter], "names": ["p"]}], lr=1e-3, fused=True)
    optimizer = stream_state(optimizer, tmp_path, 2 * 2**20)
    parameter.grad = torch.ones_like(parameter)
    gc.collect()
    before = private_bytes()
    most = 0
    for _ in range(2):
        optimizer.step()
        most = max(most, private_bytes())
    assert most - before < 2 * 2 * 2**20 + 3 * 2**20  # the rest: threads, and what torch's kernel needs


def private_bytes() -> int:
    """Memory of this process's own: not the page cache's, which mapped files share."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize(("direct", "way"), [(True, "O_DIRECT"), (False, "the page cache, without O_DIRECT")])
def test_the_banner_names_the_way_to_the_file(tmp_path: Path, direct: bool, way: str):
    with mock.patch.object(StateFile, "_make_direct", return_value=direct):
        ours, optimizer = built("adamw")
        state = mock.Mock(parts=[nn.ParameterList(ours)], optimizer=stream_state(optimizer, tmp_path, 6 * ALIGN))
    config = ParallelismConfig(offload=Offload.nvme, offload_path="/disk")
    ((label, words),) = offload_words(state, config)
    assert label == "offload"
    assert f" of optimizer state in /disk by {way}, through buffers of " in words


def test_where_the_file_system_has_no_direct_access_the_page_cache_does(tmp_path: Path):
    with mock.patch.object(StateFile, "_make_direct", return_value=False):
        pair = Pair("adamw", tmp_path, 6)
    for step in range(3):
        pair.step(step)
    pair.assert_same()


@pytest.mark.parametrize("where", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_an_error_of_one_line(where: str, tmp_path: Path):
    ours, optimizer = built("adamw")
    optimizer = stream_state(optimizer, tmp_path, 6 * ALIGN)
    set_gradients(ours, 0)
    with mock.patch(f"os.{where}", side_effect=OSError(5, "Input/output error")), pytest.raises(OffloadFailed) as error:
        optimizer.step()
    assert "parallelism.offload_path" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_step_is_taken_where_a_gradient_overflowed(tmp_path: Path):
    ours, optimizer = built("adamw")
    optimizer = stream_state(optimizer, tmp_path, 6 * ALIGN)
    before = tensors_of(ours, optimizer)
    set_gradients(ours, 0)
    optimizer.step(found_inf=torch.ones(()))  # type: ignore[call-arg]
    after = tensors_of(ours, optimizer)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_an_optimizer_without_moments_needs_no_file(tmp_path: Path):
    optimizer = SGD(parameters(), lr=0.1)
    assert stream_state(optimizer, tmp_path / "not there", 2**20) is optimizer
    assert type(optimizer) is SGD
