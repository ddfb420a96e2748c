"""The emulator finds the faults it is there for, and none in right kernels. The kernels are in emulator_kernels.cu."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.emulator import FRESH, READ_ONLY, WRITABLE, Device, EmulatorError, build_emulated
from kernels.memory import Memory

SOURCE = Path(__file__).with_name("emulator_kernels.cu")
SEEDS = range(5)


class Kernels(Device):
    """Calls test_<name>(out, in, n)."""

    def call(
        self, name: str, out: int, x: Tensor, n: int | None = None, seed: int = 0, mode: int = FRESH, offset: int = 0
    ) -> Tensor:
        """What the kernel leaves in `out` elements, at `offset` elements from where a pack is aligned."""
        self.reset(seed)
        memory = Memory((offset,))
        given, got = memory.copy(x), memory.new([out], torch.float32)
        if mode == WRITABLE:
            got.tensor.zero_()
        self.lend(given.pointer, given.size, READ_ONLY)
        self.lend(got.pointer, got.size, mode)
        function = getattr(self.library, f"test_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        status = function(got.pointer, given.pointer, x.numel() if n is None else n)
        self.check()
        assert status == 0
        memory.check()
        return got.tensor


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("gptlite-emulator"))
    return Kernels(ctypes.CDLL(str(build_emulated(folder, [SOURCE]))))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 31, 96, 200])
def test_row_sums(kernels: Kernels, width, seed) -> None:
    x = torch.randint(-50, 50, (50, width)).float()
    assert torch.equal(kernels.call("row_sums", 50, x, width, seed), x.sum(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_transpose_in_tiles(kernels: Kernels, seed) -> None:
    x = torch.randn(70, 70)
    assert torch.equal(kernels.call("transpose", 4900, x, 70, seed).view(70, 70), x.T)


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles(kernels: Kernels, seed) -> None:
    x = torch.randint(-50, 50, (64,)).float()
    assert torch.equal(kernels.call("prefix_sums", 64, x, seed=seed).view(8, 8), x.view(8, 8).cumsum(1))
    wide, number, below = kernels.call("shuffles", 96, x[:32], seed=seed).view(3, 2, 16)
    halves = x[:32].view(2, 16)
    assert torch.equal(wide, halves[:, 5:6].expand(2, 16))
    assert torch.equal(number.flatten(), 2.0 ** (torch.arange(32) ^ 3))
    assert torch.equal(below[:, :12], halves[:, 4:])
    assert torch.equal(below[:, 12:], halves[:, 12:])


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_warps_and_blocks(kernels: Kernels, seed) -> None:
    x = torch.randn(128)
    out = kernels.call("parts", 64, x, seed=seed)
    assert torch.equal(out, (x[[15, 47]] + x[[7, 39]]).repeat_interleave(32))
    rolled = x.view(4, 32).roll(-1, 1).roll(-1, 0).flatten()
    assert torch.equal(kernels.call("neighbours", 128, x, seed=seed), rolled)


@pytest.mark.parametrize("seed", SEEDS)
def test_packs_structs_and_indices(kernels: Kernels, seed) -> None:
    x = torch.randn(400)
    doubled = torch.cat([2 * x.view(100, 4)[:, :1], x.view(100, 4)[:, 1:]], 1)
    assert torch.equal(kernels.call("packs", 400, x, seed=seed).view(100, 4), doubled)
    assert torch.equal(kernels.call("takes_struct", 32, x, 7, seed), torch.arange(32) + 8.0)
    blocks, threads = torch.arange(24.0)[:, None], torch.arange(30.0)
    assert torch.equal(kernels.call("index_of_thread", 720, x, seed=seed).view(24, 30), blocks * 1000 + threads)


def test_an_output_keeps_what_is_not_written(kernels: Kernels) -> None:
    out = kernels.call("leaves_some_unwritten", 32, torch.zeros(1), 30)
    assert out.isnan().tolist() == [False] * 30 + [True] * 2


FAULTS = {
    "reads_past_end": "out of bounds: read of 4 bytes at byte 256 of 256 bytes of global memory",
    "writes_past_end": "out of bounds: write of 4 bytes at byte 256 of 256 bytes of global memory",
    "reads_before_start": "out of bounds: read of 4 bytes at byte -4 of 256 bytes of global memory",
    "writes_input": "write of 4 bytes at byte .* memory that is only to be read",
    "reads_null": "out of bounds: read of 4 bytes in no memory of the device",
    "reads_host_memory": "out of bounds: read of 4 bytes",
    "pack_past_end": "out of bounds: write of (16|4) bytes at byte 256 of 256 bytes of global memory",
    "misaligned_pack": "misaligned access, at an address that ends in 0x.?4",
    "shared_past_end": "out of bounds: write of 4 bytes at byte 124 of 124 bytes of shared memory",
    "unwritten_shared": "read of shared memory that nothing was written to, byte 20",
    "unwritten_static": "read of shared memory that nothing was written to",
    "unwritten_output": "read of global memory that nothing was written to",
    "past_array": "index 4 is out of an array's bounds",
    "copies_past_end": "out of bounds: read of 260 bytes at byte 0 of 256 bytes of global memory",
    "never_ends": "the block does not come to an end",
    "read_without_barrier": "race: (read|write) of shared memory, .* by thread|that nothing was written to",
    "write_without_barrier": "race: (read|write) of shared memory, .* no barrier since the (write|read) by thread",
    "two_writers": "race: write of shared memory, .* no barrier since the write by thread",
    "many_readers_in_warp": "race: (read|write) of shared memory, .* no barrier since the (write|read) by",
    "many_readers": "race: (read|write) of shared memory, .* no barrier since the (write|read) by",
    "shuffle_is_no_barrier": "race: (read|write) of shared memory, .* no barrier since the (write|read) by thread",
    "blocks_write_same": "race: write of global memory, .* no barrier since the write by another block",
    "block_reads_others": "race: (read|write) of global memory, .* since the (write|read) by another block",
    "exits_before_barrier": r"__syncthreads is reached by thread \d+, but thread 40 has exited",
    "two_barriers": r"__syncthreads is reached by thread \d+, but thread \d+ waits at __syncthreads in line \d+",
    "barrier_against_shuffle": r"shuffle of .* mask ffffffff names lane \d+, which waits at __syncthreads in line \d+",
    "lane_exits": "mask ffffffff names lane 7, which has exited",
    "mask_leaves_out_itself": r"mask 0000ffff leaves out its own lane (1[6-9]|2\d|3[01])",
    "reads_absent_lane": r"reads lane (1[6-9]|2[0-3]), which its mask 0000ffff does not name",
    "part_of_a_warp": "mask ffffffff names lane 16 of a block of 48 threads",
    "divergent_syncwarp": r"__syncwarp of .* mask ffffffff names lane \d*[02468], which has exited",
    "odd_width": "width 12 is not a power of 2",
    "index_overflows": "overflow of a signed product",
    "sum_overflows": "overflow of a signed sum",
    "divides_by_zero": "integer division by zero",
}


SLOW_FAULTS = ("never_ends",)


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW_FAULTS else []) for each in FAULTS]
)
def test_a_fault_is_found_and_its_line_told(kernels: Kernels, fault) -> None:
    lines = SOURCE.read_text().splitlines()
    numbers = {i for i, line in enumerate(lines, start=1) if line.endswith(f"// FAULT {fault}")}
    assert numbers
    for seed in SEEDS if fault != "never_ends" else (0,):
        mode = FRESH if fault == "unwritten_output" else WRITABLE
        with pytest.raises(EmulatorError, match=FAULTS[fault]) as caught:
            kernels.call(fault, 128 if fault == "unwritten_static" else 64, torch.ones(64), seed=seed, mode=mode)
        message = str(caught.value)
        assert message.startswith(f"{fault}: ")
        assert re.search(r", by thread \(\d+, 0, 0\) of block \(\d+, 0, 0\) at ", message)
        told = {int(number) for number in re.findall(rf"{SOURCE.name}:(\d+)", message)}
        assert told
        assert told <= numbers


def test_every_faulty_kernel_is_tested() -> None:
    assert set(re.findall(r"// FAULT (\w+)$", SOURCE.read_text(), flags=re.MULTILINE)) == set(FAULTS)


def test_a_fault_does_not_outlive_its_call(kernels: Kernels) -> None:
    for _ in range(3):
        with pytest.raises(EmulatorError, match="out of bounds"):
            kernels.call("reads_past_end", 64, torch.ones(64))
        assert torch.equal(kernels.call("row_sums", 50, torch.ones(50, 96), 96), torch.full((50,), 96.0))


def test_a_misaligned_pack_by_an_offset_of_its_buffer(kernels: Kernels) -> None:
    with pytest.raises(EmulatorError, match="misaligned access"):
        kernels.call("packs", 400, torch.ones(400), offset=1)


def test_a_launcher_is_checked_too(kernels: Kernels) -> None:
    with pytest.raises(
        EmulatorError, match=r"overflow of a signed product, in the launcher at emulator_kernels.cu:\d+"
    ):
        kernels.call("overflow_in_launcher", 1, torch.ones(64))


INVALID_VALUE, INVALID_CONFIGURATION = 1, 9


def test_limits_of_a_launch(kernels: Kernels) -> None:
    def status(x=1, y=1, z=1, threads=32, shared=0, leave=0) -> int:
        kernels.reset(0)
        result = kernels.library.test_limits(*map(ctypes.c_int64, (x, y, z, threads, shared, leave)))
        kernels.check()
        return result

    kernels.shape()
    assert status(x=100_000, threads=1) == status(y=65535, threads=1) == status(threads=1024) == 0
    for wrong in ({"x": 0}, {"y": 0}, {"z": 0}, {"threads": 0}, {"threads": 1025}, {"y": 65536}, {"z": 65536}):
        assert status(**wrong) == INVALID_CONFIGURATION
    assert status(shared=48 * 1024) == 0
    assert status(shared=48 * 1024 + 1) == INVALID_VALUE
    assert status(shared=227 * 1024, leave=227 * 1024) == 0
    assert status(shared=100 * 1024 + 1, leave=100 * 1024) == INVALID_VALUE
    assert status(leave=227 * 1024 + 1) == 100 * INVALID_VALUE
    kernels.shape(processors=108, shared=163 * 1024)
    assert status(leave=163 * 1024 + 1) == 100 * INVALID_VALUE
    assert kernels.library.test_processors() == 108
    kernels.shape()
    assert kernels.library.test_processors() == 3
