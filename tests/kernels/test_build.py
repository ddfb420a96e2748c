"""The build under everything that can go wrong, on a library of two small sources; processes are forked."""

import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptlite.kernels import build, cache, fakes, library, units
from gptlite.kernels.library import LoadedLibrary, Unavailable, load, prepare
from gptlite.kernels.toolchain import BuildError, find_cxx

CXX = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")
compiles = pytest.mark.slow

SOURCES = {
    "units.py": "",
    "build.py": "",
    "include/gptlite_kernels.h": "",
    "cpu/dispatch.cpp": """#define EXPORTED extern "C" __attribute__((visibility("default")))
    EXPORTED const char* gptlite_cpu_isa() { return "tiny"; }
    EXPORTED int gptlite_cpu_limit_isa(const char*) { return 0; }""",
    # A name of its own: the real library may be loaded in the process that is forked.
    "binding/schemas.cpp": "#include <torch/csrc/stable/library.h>\n"
    'STABLE_TORCH_LIBRARY(gptlite_tiny, m) { m.def("twice(Tensor x) -> Tensor"); }',
    "cuda/kernel.cu": "",
}
UNITS = 2


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small sources in place of the real ones, a cache folder, and a compiler that writes down its calls."""
    root = tmp_path / "sources"
    for name, text in SOURCES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for module in (units, library):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(fakes, "FAKES", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    command(tmp_path, "c++", f'echo "$@" >> {tmp_path}/calls\nexec {CXX} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return root


def command(tmp_path: Path, name: str, script: str) -> None:
    """A program on PATH."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def compilations(tmp_path: Path) -> int:
    """How many sources were compiled."""
    return sum(" -c " in line for line in (tmp_path / "calls").read_text().splitlines())


def forked(call: Callable[[], Any], processes: int = 1) -> list[Any]:
    """Results of a call in processes of their own, at once."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    started = [context.Process(target=lambda: queue.put(call())) for _ in range(processes)]
    gc.collect()
    gc.freeze()  # what other tests have left, e.g. of threads that a child does not have, is not collected there
    try:
        for process in started:
            process.start()
    finally:
        gc.unfreeze()
    results = [queue.get(timeout=120) for _ in started]
    for process in started:
        process.join(timeout=30)
    return results


def loaded_in_a_process(processes: int = 1) -> list[tuple[LoadedLibrary | Unavailable, list[str]]]:
    """What `load` returns and says in fresh processes; whether torch then has the op."""

    def call() -> tuple[LoadedLibrary | Unavailable, list[str]]:
        library._LOADED.clear()
        lines: list[str] = []
        found = load("cpu", lines.append)
        if isinstance(found, LoadedLibrary):
            import torch

            assert torch.ops.gptlite_tiny.twice.default
            assert load("cpu", print) is found
        return found, lines

    return forked(call, processes)


def reason_in_a_process() -> str:
    """Why `load` finds none in a fresh process."""
    ((found, _),) = loaded_in_a_process()
    assert isinstance(found, Unavailable)
    return found.reason


def quiet(line: str) -> None:
    """A log that keeps nothing."""


@compiles
def test_it_is_compiled_once_and_found_the_next_time(tmp_path: Path) -> None:
    lines: list[str] = []
    first, second = prepare(False, lines.append), prepare(False, lines.append)
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path
    assert compilations(tmp_path) == UNITS
    assert len(lines) == 2  # that it begins, that it is done
    assert {path.name for path in first.path.parent.iterdir()} == {".lock", first.path.name, f"{first.path.stem}.json"}
    ((found, said),) = loaded_in_a_process()
    assert isinstance(found, LoadedLibrary)
    assert (found.isa, found.cached, found.cuda, said) == ("tiny", True, False, [])


@compiles
def test_ten_processes_that_start_cold_compile_once(tmp_path: Path) -> None:
    results = loaded_in_a_process(processes=10)
    assert all(isinstance(found, LoadedLibrary) for found, _ in results), results
    assert compilations(tmp_path) == UNITS
    assert sum(not found.cached for found, _ in results if isinstance(found, LoadedLibrary)) == 1
    assert {line for _, lines in results for line in lines if "waiting" in line} <= {
        "kernels: another process is compiling the kernels; waiting for it"
    }


def test_a_library_for_cpus_does_not_depend_on_the_sources_for_gpus() -> None:
    ours, all_ = ([path.name for path in units.sources(cuda)] for cuda in (False, True))
    assert ours == ["units.py", "build.py", "gptlite_kernels.h", "dispatch.cpp", "schemas.cpp"]
    assert all_ == [*ours, "kernel.cu"]


@compiles
def test_a_changed_source_is_another_library(sources: Path) -> None:
    first = prepare(False, quiet).path
    (sources / "include" / "gptlite_kernels.h").write_text("// changed")
    assert prepare(False, quiet).path != first
    assert first.exists()  # another run may be using it


@pytest.mark.parametrize("present", [[], pytest.param(["gcc"], marks=pytest.mark.slow)])
def test_without_a_compiler_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: list[str]
) -> None:
    shutil.rmtree(tmp_path / "bin")
    (tmp_path / "bin").mkdir()
    for name in present:
        command(tmp_path, name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    words = "no C++ compiler: neither c++, g++ nor clang++ is on PATH, and CXX is not set"
    assert reason_in_a_process() == words


def test_a_compiler_that_cxx_names_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    with pytest.raises(BuildError, match=r"the compiler CXX=/nowhere/c[+][+] -m64 does not exist"):
        find_cxx()
    monkeypatch.setenv("CXX", f"{CXX} -m64")
    assert find_cxx().command == (CXX, "-m64")


@compiles
def test_another_compiler_name_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin" / "c++").rename(tmp_path / "bin" / "g++")
    for tool in ("as", "ld"):
        command(tmp_path, tool, f'exec {shutil.which(tool)} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert prepare(False, quiet).record.compiler.startswith("g++ (")


@compiles
def test_what_a_machine_with_a_compiler_left_in_a_shared_home_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepare(False, quiet)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    found = prepare(False, quiet)
    assert (found.path, found.cached) == (made.path, True)
    monkeypatch.setattr(cache, "_digest", lambda path: "")  # damaged: not used
    with pytest.raises(BuildError, match=r"no C[+][+] compiler"):
        prepare(False, quiet)


@compiles
def test_a_home_that_cannot_be_written_leaves_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    lines: list[str] = []
    found = prepare(False, lines.append)
    folder = tmp_path / "temporary" / f"gptlite-kernels-{os.getuid()}"
    assert found.path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "/proc/nowhere" in lines[0]
    assert lines[0].endswith(f"; the library is stored in {folder} instead")
    assert "\n" not in lines[0]
    lines.clear()
    assert prepare(False, lines.append).cached
    assert lines == []


@compiles
def test_without_a_home_the_temporary_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert prepare(False, quiet).path.is_relative_to(tmp_path / "temporary")


@compiles
def test_a_temporary_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    made = prepare(False, quiet).path
    made.parent.chmod(0o777)
    reason = reason_in_a_process()
    assert "/proc/nowhere" in reason
    assert f"{made.parent} must be a folder that only this user can access" in reason


@pytest.mark.slow
def test_nowhere_to_write_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    reason = reason_in_a_process()
    assert reason.startswith("no writable folder to compile in: ")


@pytest.mark.parametrize("damage", ["half", "flipped", "empty", "no record", "torn record", "no library"])
@compiles
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damage: str) -> None:
    path = prepare(False, quiet).path
    content, record = path.read_bytes(), path.with_suffix(".json")
    match damage:
        case "half":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "empty":
            path.write_bytes(b"")
        case "no record":
            record.unlink()
        case "torn record":
            record.write_text(record.read_text()[:40])
        case "no library":
            path.unlink()
    ((found, lines),) = loaded_in_a_process()
    assert isinstance(found, LoadedLibrary)
    assert not found.cached
    assert compilations(tmp_path) == 2 * UNITS
    assert (f"kernels: {path} is damaged; compiling it again" in lines) == (damage != "no library")


@compiles
def test_a_library_that_is_whole_but_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    made = prepare(False, quiet)
    made.path.write_bytes(b"of another world")
    record = replace(made.record, sha256=hashlib.sha256(b"of another world").hexdigest())
    made.path.with_suffix(".json").write_text(json.dumps(record.__dict__))
    ((found, lines),) = loaded_in_a_process()
    assert isinstance(found, LoadedLibrary)
    assert "does not load" in lines[0]
    assert compilations(tmp_path) == 2 * UNITS


def test_a_library_without_our_ops_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "FAKES", {"twice": None, "thrice": None})
    path = cache.home_folder(make=True) / "library.so"
    made = cache.LibraryRecord("", False, "", "c++", "", 1.0)
    for content, usable in ((b"\0twice(Tensor x)\0", False), (b"\0twice(Tensor x)\0thrice(Tensor x)", True)):
        record = replace(made, sha256=hashlib.sha256(content).hexdigest())
        path.write_bytes(content)
        path.with_suffix(".json").write_text(json.dumps(record.__dict__))
        assert (library._find([path.name]) is not None) is usable


@compiles
def test_a_compiler_that_fails_says_its_first_errors_in_one_line(sources: Path) -> None:
    (sources / "cpu" / "dispatch.cpp").write_text("int f() { return nothing_of_the_kind; }\n")
    reason = reason_in_a_process()
    assert reason.startswith("dispatch.cpp does not compile with c++: ")
    assert "nothing_of_the_kind" in reason
    assert "\n" not in reason
    assert [path.name for path in cache.home_folder().iterdir()] == [".lock"]


def test_a_reason_quotes_the_first_three_errors() -> None:
    told = [f"a.cpp:{line}: error: no {line}" for line in range(5)]
    compilers = SimpleNamespace(run=lambda _: SimpleNamespace(returncode=1, stdout="", stderr="\n".join(told)))
    with pytest.raises(BuildError) as refusal:
        build._run(["c++"], "a.cpp does not compile", compilers)  # type: ignore[arg-type]
    assert str(refusal.value) == f"a.cpp does not compile with c++: {told[0]} | {told[1]} | {told[2]}"


@compiles
def test_a_library_that_does_not_link_says_so(sources: Path) -> None:
    (sources / "cpu" / "dispatch.cpp").write_text("int nowhere(); int f() { return nowhere(); }\n")
    with pytest.raises(BuildError, match=r"the kernels do not link with c[+][+]: .*undefined .*nowhere"):
        prepare(False, quiet)


@compiles
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    leftover = cache.home_folder() / f"{cache.UNFINISHED}x"
    leftover.mkdir(parents=True)
    (leftover / "half.o").write_text("")
    prepare(False, quiet)
    assert not leftover.exists()


@compiles
def test_a_disk_that_fills_up_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library, "keep", full)
    reason = reason_in_a_process()
    assert "No space left" in reason
    assert [path.name for path in cache.home_folder().iterdir()] == [".lock"]


@compiles
def test_without_nvcc_the_cpu_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(os.environ['PATH'].split(':')[0])}:/usr/bin:/bin")
    found = prepare(True, quiet)
    assert (found.record.cuda, found.why_no_cuda) == (False, "no nvcc on PATH, and CUDA_HOME is not set")


@compiles
def test_an_nvcc_that_fails_leaves_the_cpu_kernels_and_the_reason(tmp_path: Path) -> None:
    says = "echo 'Cuda compilation tools, release 9.9'"
    command(
        tmp_path,
        "nvcc",
        f'case "$*" in *--version*) {says};; *) echo "kernel.cu: error: no such GPU" >&2; exit 1;; esac',
    )
    found = prepare(True, quiet)
    assert not found.record.cuda
    assert "kernel.cu does not compile with" in found.why_no_cuda
    assert "error: no such GPU" in found.why_no_cuda
    assert ctypes.CDLL(str(found.path)).gptlite_cpu_isa
    assert prepare(True, quiet).cached  # not tried anew at every start
    assert "error: no such GPU" in prepare(True, quiet).why_no_cuda


def test_other_systems_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("mps", quiet) == Unavailable("kernels exist for cpu and cuda, not for mps")
    monkeypatch.setattr(library.platform, "system", lambda: "Darwin")
    with pytest.raises(BuildError, match="only on Linux, not on Darwin"):
        prepare(False, quiet)


@compiles
def test_a_long_compilation_says_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(build.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    prepare(False, lines.append)
    assert any(line.startswith("kernels: CPU kernels, 1 of 2 files compiled, ETA ") for line in lines)


@compiles
def test_a_plain_library_needs_no_torch(tmp_path: Path) -> None:
    path = build.build_plain(tmp_path, log=quiet)
    isa = ctypes.CDLL(str(path)).gptlite_cpu_isa
    isa.restype = ctypes.c_char_p
    assert isa() == b"tiny"
    assert not list(tmp_path.glob(".tmp-*"))
