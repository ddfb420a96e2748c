"""Which GPU a library is compiled for and taken by, how many compilers run, and a torch that lacks what it asks for.

With the small sources of test_build.py and an nvcc that writes down its calls.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptlite.kernels import build, library
from gptlite.kernels.library import LoadedLibrary, Unavailable, gpu_arch, load, prepare
from gptlite.kernels.toolchain import BuildError, cudart, find_nvcc
from gptlite.kernels.units import ROOT
from kernels.test_build import CXX, command, compiles, forked, quiet, sources

__all__ = ["sources"]  # a fixture that all tests of this file have
pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")

NVCC = """case "$*" in
*--version*) echo 'Cuda compilation tools, release 13.0';;
*--list-gpu-code*) printf 'sm_75\\nsm_80\\nsm_90\\n';;
*--dryrun*) exit 1;;
*" -c "*) echo "$@" >> {calls}; for last; do :; done; echo | {cxx} -x c++ -c - -o "$last";;
*) exit 1;;
esac"""
OF_80, OF_90 = "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"
PTX = "-gencode=arch=compute_90,code=[sm_90,compute_90]"


@pytest.fixture(autouse=True)
def nvcc(sources: Path, tmp_path: Path) -> None:
    """Compiles for sm_75, 80 and 90."""
    command(tmp_path, "nvcc", NVCC.format(calls=tmp_path / "nvcc-calls", cxx=CXX))
    archive = tmp_path / "lib64" / "libcudart_static.a"
    archive.parent.mkdir()
    archive.write_bytes(b"!<arch>\n")


def with_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(library, "gpu_arch", lambda: arch)


def codes(tmp_path: Path) -> list[list[str]]:
    """The architectures of each call of nvcc."""
    path = tmp_path / "nvcc-calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[each for each in line.split() if each.startswith("-gencode")] for line in lines]


@compiles
def test_where_there_is_a_gpu_it_is_compiled_for_that_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "90")
    lines: list[str] = []
    found = prepare(True, lines.append)
    assert (found.record.cuda, found.cached, found.why_no_cuda) == (True, False, "")
    assert codes(tmp_path) == [[OF_90]]
    assert "-cuda-sm_90-" in found.path.name
    assert "CUDA kernels for sm_90" in lines[0]
    assert prepare(True, quiet).cached


@compiles
def test_without_cudas_runtime_the_cpu_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "90")
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    found = prepare(True, quiet)
    assert not found.record.cuda
    assert found.why_no_cuda.startswith("no libcudart_static.a")


@compiles
def test_without_a_gpu_it_serves_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepare(True, quiet)
    assert codes(tmp_path) == [[OF_80, PTX]]
    assert "-sm_" not in found.path.name
    for arch in ("80", "86", "90", "120"):  # a compute node finds what the login node compiled
        with_gpu(monkeypatch, arch)
        assert prepare(True, quiet).path == found.path
    assert len(codes(tmp_path)) == 1


@compiles
def test_a_gpu_that_is_older_than_what_serves_any_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(True, quiet)
    with_gpu(monkeypatch, "75")
    assert "-cuda-sm_75-" in prepare(True, quiet).path.name
    assert codes(tmp_path)[1:] == [["-gencode=arch=compute_75,code=sm_75"]]


@compiles
def test_a_library_for_another_gpu_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepare(True, quiet, arch="80")
    (tmp_path / "bin" / "nvcc").unlink()
    with_gpu(monkeypatch, "80")
    assert prepare(True, quiet).path == made.path  # by a machine without nvcc
    with_gpu(monkeypatch, "90")
    found = prepare(True, quiet)
    assert (found.record.cuda, found.why_no_cuda) == (False, "no nvcc on PATH, and CUDA_HOME is not set")


@compiles
def test_a_machine_without_nvcc_takes_what_serves_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepare(True, quiet)
    (tmp_path / "bin" / "nvcc").unlink()
    with_gpu(monkeypatch, "90")
    assert prepare(True, quiet).path == made.path
    with_gpu(monkeypatch, "75")
    assert not prepare(True, quiet).record.cuda


@compiles
def test_an_nvcc_older_than_the_gpu_compiles_for_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "120")
    assert prepare(True, quiet).record.cuda
    assert codes(tmp_path) == [[OF_80, PTX]]


def test_an_architecture_that_nvcc_does_not_know_is_refused() -> None:
    with pytest.raises(BuildError, match=r"nvcc \(.*13.0\) does not compile for sm_120"):
        prepare(True, quiet, arch="120")
    assert [find_nvcc().compiles_for(arch) for arch in ("9", "90", "900")] == [False, True, False]


@pytest.mark.parametrize(
    ("capabilities", "arch"),
    [([], ""), ([(9, 0)], "90"), ([(8, 6)] * 2, "86"), ([(12, 0)], "120"), ([(8, 0), (9, 0)], "")],
)
def test_the_architecture_of_the_gpus(capabilities: list, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    assert gpu_arch() == arch


# Where toolkits have CUDA's static runtime, by the processor of this machine: of ARM servers it is "sbsa".
FOLDERS = [
    ("x86_64", "lib64"),
    ("x86_64", "lib"),
    ("x86_64", "targets/x86_64-linux/lib"),
    ("aarch64", "lib64"),
    ("aarch64", "lib"),
    ("aarch64", "targets/sbsa-linux/lib"),
]


@pytest.mark.parametrize(("machine", "folder"), FOLDERS)
def test_cudas_runtime_is_that_of_this_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, folder: str
) -> None:
    """In the toolkit that nvcc names, or where nvcc is; a toolkit for both processors has another one for the other."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    foreign = tmp_path / "targets" / ("x86_64-linux" if machine == "aarch64" else "sbsa-linux") / "lib"
    foreign.mkdir(parents=True)
    (foreign / "libcudart_static.a").write_bytes(b"!<arch>\n")
    with pytest.raises(BuildError, match=r"^no libcudart_static\.a in the CUDA toolkit of .*nvcc$"):
        cudart(find_nvcc())
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "libcudart_static.a").write_bytes(b"!<arch>\n")
    assert cudart(find_nvcc()) == tmp_path / folder / "libcudart_static.a"
    elsewhere = tmp_path / "elsewhere" / folder
    elsewhere.mkdir(parents=True)
    (elsewhere / "libcudart_static.a").write_bytes(b"!<arch>\n")
    lines = f"#$ _NVVM_BRANCH_=nvvm\\n#$ TOP={tmp_path / 'elsewhere'}\\n"
    command(tmp_path, "nvcc", f"case \"$*\" in *--dryrun*) printf '{lines}' >&2;; *) echo 'release 13.0';; esac")
    assert cudart(find_nvcc()) == elsewhere / "libcudart_static.a"


@pytest.mark.parametrize(
    ("cores", "memory", "container", "jobs"),
    [
        (2, 64, "max", 2),
        (8, 6, "max", 6),
        (64, 512, None, 16),
        (64, 512, str(12 * 2**30), 12),
        (64, 512, str(1000 * 2**30), 16),
        (4, 0, "max", 1),
    ],
)
def test_as_many_compilers_as_cores_and_memory_allow(
    cores: int, memory: int, container: str | None, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": memory * 2**18, "SC_PAGE_SIZE": 4096}.get)
    monkeypatch.setattr(build, "MEMORY_LIMIT", tmp_path / "memory.max")
    if container is not None:
        (tmp_path / "memory.max").write_text(container)
    assert build.jobs_here() == jobs


# The real header, as if nvcc had been there: an op that asks for the stream.
ASKS = f"""#define USE_CUDA
#include "{ROOT / "binding" / "common.h"}"
using torch::stable::Tensor;
Tensor asks(const Tensor& x) {{
  gptlite::binding::current_stream(0);
  return x;
}}
extern "C" __attribute__((visibility("default"))) int gptlite_cuda_knows_stream() {{
  return gptlite::binding::knows_stream();
}}
STABLE_TORCH_LIBRARY(gptlite_asks, m) {{ m.def("asks(Tensor x) -> Tensor"); }}
STABLE_TORCH_LIBRARY_IMPL(gptlite_asks, CPU, m) {{ m.impl("asks", TORCH_BOX(&asks)); }}
"""


@compiles
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch knows its stream")
def test_a_torch_that_does_not_tell_its_stream_is_an_error_and_no_crash(sources: Path) -> None:
    shutil.copy(ROOT / "include" / "gptlite_kernels.h", sources / "include")
    (sources / "binding" / "schemas.cpp").write_text(ASKS)
    made = prepare(False, quiet)

    def call() -> tuple[str, bool]:
        torch.ops.load_library(made.path)
        try:
            torch.ops.gptlite_asks.asks(torch.zeros(1))
        except RuntimeError as error:
            return str(error), library.knows_stream(made.path)
        return "", True

    ((message, knows),) = forked(call)
    assert "this torch does not have aoti_torch_get_current_cuda_stream: no CUDA kernel can run" in message
    assert not knows


def test_kernels_that_are_not_told_the_stream_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedLibrary(Path("library.so"), True, "avx2", 1.0, True, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "_LOADED", [loaded])
    monkeypatch.setattr(library, "knows_stream", lambda path: False)
    found = load("cuda", quiet)
    assert isinstance(found, Unavailable)
    assert "lacks aoti_torch_get_current_cuda_stream, which returns the current CUDA stream" in found.reason
    assert load("cpu", quiet) is loaded
    monkeypatch.setattr(library, "knows_stream", lambda path: True)
    assert load("cuda", quiet) is loaded
