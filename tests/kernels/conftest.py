"""The `backend` of the kernel tests."""

import ctypes
import zlib
from pathlib import Path

import pytest

from kernels import library
from kernels.backends import UNSUPPORTED, Backend
from kernels.cases import BEST, EMULATED
from kernels.emulator import build_emulated, emulated


@pytest.fixture(scope="session")
def cpu_library() -> ctypes.CDLL:
    return library.load(library.compiled())


@pytest.fixture(scope="session")
def emulated_library(request: pytest.FixtureRequest) -> Backend:
    assert request.config.cache is not None
    return emulated(build_emulated(Path(request.config.cache.mkdir("gptlite-emulator"))))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend that the test's parameter names; the test is skipped where this machine has not got it."""
    if request.param == EMULATED:
        # Every test has an order of threads and blocks of its own.
        return request.getfixturevalue("emulated_library").having(seed=zlib.crc32(request.node.name.encode()))
    cpu = request.getfixturevalue("cpu_library")
    isa = None if request.param == BEST else request.param
    if cpu.gptlite_cpu_limit_isa(None if isa is None else isa.encode()) == UNSUPPORTED:
        pytest.skip(f"no {isa} here")
    return Backend(request.param, cpu, "gptlite_cpu_", isa=isa)
