"""The `backend` of the kernel tests."""

import ctypes
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import library
from kernels.backends import Backend, limit_isa
from kernels.cases import BEST, EMULATED
from kernels.emulator import build_emulated, emulated
from kernels.loop import pytest_pyfunc_call  # noqa: F401


@pytest.fixture(scope="session")
def cpu_library() -> ctypes.CDLL:
    return library.load(library.compiled())


@pytest.fixture(scope="session")
def emulated_library(request: pytest.FixtureRequest) -> Backend:
    assert request.config.cache is not None
    return emulated(build_emulated(Path(request.config.cache.mkdir("gptlite-emulator"))))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that the test's parameter names; the test is skipped where this machine has not got it."""
    if request.param == EMULATED:
        # Every test has an order of threads and blocks of its own.
        yield request.getfixturevalue("emulated_library").having(seed=zlib.crc32(request.node.name.encode()))
        return
    cpu = request.getfixturevalue("cpu_library")
    isa = None if request.param == BEST else request.param
    if not limit_isa(cpu, isa):
        pytest.skip(f"no {isa} here")
    yield Backend(request.param, cpu, "gptlite_cpu_", isa=isa)
    limit_isa(cpu, None)  # torch's ops in this process are of the same library
