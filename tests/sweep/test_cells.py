"""Which cells a sweep has, what they are called, and which are refused before the first starts."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from gptlite.config import load
from gptlite.config.batch import check_world
from gptlite.config.schema import CONF_DIR, register
from gptlite.errors import ConfigError
from gptlite.launch import host_memory
from gptlite.satellites.sweep.begin import Sweep, exit_code, refuse_others, sweep_overrides
from gptlite.satellites.sweep.cells import checked_cells, parsed_overrides
from gptlite.satellites.sweep.folder import Record, SweepFolder
from gptlite.satellites.sweep.job import predicted
from sweep.sweeps import SMALL


def cells(*overrides: str, base: Iterable[str] = SMALL) -> list[Record]:
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        given = [*base, "hydra.sweep.dir=s", *overrides]
        config = loader.load_configuration("config", given, run_mode=RunMode.MULTIRUN)
        return checked_cells(loader, config, parsed_overrides(loader, config), world=True)


def test_cells_are_named_by_what_differs() -> None:
    found = cells("parallelism=single,tp2", "optimizer.lr=1e-3,2e-3", "seed=7")
    assert [cell.name for cell in found] == ["single lr=0.001", "single lr=0.002", "tp2 lr=0.001", "tp2 lr=0.002"]
    assert [cell.run_dir for cell in found][1:3] == ["s/1-single-lr0.002", "s/2-tp2-lr0.001"]
    assert [cell.number for cell in found] == [0, 1, 2, 3]
    assert found[3].overrides[-3:] == ["parallelism=tp2", "optimizer.lr=0.002", "seed=7"]
    assert len({cell.digest for cell in found}) == 4


def test_a_value_with_equals_signs_and_slashes_names_one_folder() -> None:
    found = cells("trainer.sample_prompt='a=b','c/d=e'", "data.batch_ramp=[2,2,8],null")
    assert [cell.run_dir for cell in found][1:3] == [
        "s/1-sample_prompt_a_b-batch_ramp_null", "s/2-sample_prompt_c_d_e-batch_ramp2_2_8",
    ]  # fmt: skip


def test_a_digest_is_of_what_is_trained_not_of_where() -> None:
    (a, b), (c, d) = cells("seed=1,2"), cells("seed=2,1", "run.name=other", "hydra.sweep.dir=t")
    assert (a.digest, b.digest) == (d.digest, c.digest)
    assert a.digest != b.digest
    assert cells("seed=1", "trainer.max_steps=4")[0].digest != a.digest


@pytest.mark.parametrize("values", ["range(1,1000000000)", "range(0,1,1e-9)", "range(0,1e300)", "range(1,2,0)"])
def test_too_many_cells_are_refused_before_they_are_expanded(values: str) -> None:
    with pytest.raises(ConfigError, match=rf"seed={re.escape(values)}: the sweep has [\d,]+ cells, more than 10,000"):
        cells("optimizer.lr=1e-3,2e-3", f"seed={values}")


def test_illegal_cells_have_their_reason_and_the_rest_none() -> None:
    found = cells("parallelism.tensor=1,4", "parallelism.zero=0,5")
    reasons = [cell.reason for cell in found]
    assert [bool(reason) for reason in reasons] == [False, True, True, True]
    assert reasons[2] == "model.num_heads=2 is not divisible by parallelism.tensor=4; try parallelism.tensor=1, 2"
    assert reasons[1] == "parallelism.zero=5 is not a ZeRO stage; use 0, 1, 2 or 3"


def test_what_depends_on_the_number_of_ranks_prunes_too() -> None:
    """The batch of 4 in micro-batches of 2 feeds two data ranks, not three."""
    found = cells("parallelism.zero=1", "parallelism.dp_replicate=1,3")
    assert not found[0].reason
    assert found[1].reason.startswith("data.global_batch_size=4 = data.micro_batch_size=2 x accumulation x data=6")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["parallelism.tensr=1,2"], "parallelism.tensr is not a key; did you mean parallelism.tensor?"),
        (["parallelism=single,ddpp"], "parallelism=ddpp does not exist; did you mean ddp?"),
        (["parallelism.tensor=1,abc"], "parallelism.tensor: abc is not a whole number"),
        (["parallelism.tensor=3,5"], "none of the 2 cells can run; the first one: model.num_heads=2 is not divisible"),
        pytest.param(
            ["+parallelism.tensr=1,2"],
            "none of the 2 cells can run; the first one: parallelism.tensr is not a key",
            marks=pytest.mark.slow,
        ),
        (["seed=1,2", "hydra.sweep.subdir=x"], "hydra.sweep.subdir gives cells 1 and 2 the same folder, s/x"),
        pytest.param(
            ["seed=1,2", "trainer.host_memory_limit=-1"],
            "none of the 2 cells can run; the first one: trainer.host_memory",
            marks=pytest.mark.slow,
        ),
        (["+sweep=paralelism"], "sweep=paralelism does not exist; did you mean parallelism?"),
    ],
)
def test_what_is_wrong_with_the_sweep_itself_is_one_line(overrides: list[str], line: str) -> None:
    from gptlite.config.messages import refusals

    with pytest.raises(ConfigError) as error, refusals():
        cells(*overrides)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_cell_that_repeats_another_is_pruned() -> None:
    assert [cell.reason for cell in cells("seed=1,2,1")] == ["", "", "the same overrides as cell 1"]


def test_a_sweep_without_an_axis_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for swept, ending in ((["seed"], "1 to run"), ([], "; no key has several values, as in optimizer.lr=1e-3,3e-3")):
        folder = header(tmp_path / str(len(swept)), swept=swept)
        Sweep._settle(SimpleNamespace(folder=folder), [Record(0, "0", [], "")])  # type: ignore[arg-type]
        assert capsys.readouterr().out.rstrip().endswith(ending)


def test_a_prediction_on_a_machine_that_was_not_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptlite.satellites.plan.local.read_calibration", lambda _: None)
    config = load([*SMALL])
    found = predicted(config, check_world(config, 1))
    assert found is not None
    assert found["assumed"].startswith("cluster=local has not been measured")


def test_a_subdir_of_ones_own() -> None:
    found = cells("seed=1,2", "hydra.sweep.subdir=job-${hydra.job.num}")
    assert [cell.run_dir for cell in found] == ["s/job-0", "s/job-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "count", "legal"),
    [("parallelism", 8, 8), ("degrees", 24, 16), ("zero", 4, 4), ("schedules", 5, 5), ("recomputation", 12, 12)],
)
def test_a_sweep_preset_has_its_number_of_legal_cells(preset: str, count: int, legal: int) -> None:
    """Two heads are not to be cut in four."""
    small = [each for each in SMALL if not each.startswith("data.micro_batch_size=")]
    found = cells(f"+sweep={preset}", "model.num_layers=4", "data.global_batch_size=16", base=small)
    assert (len(found), sum(not cell.reason for cell in found)) == (count, legal)
    assert preset in {file.stem for file in (CONF_DIR / "sweep").glob("*.yaml")}


def header(folder: Path, **values: object) -> SweepFolder:
    sweep = SweepFolder(folder)
    sweep.open({"overrides": ["seed=1,2", "+sweep=zero"], "hydra": [], "swept": ["seed"], "cells": 2, **values})
    return sweep


def test_a_folder_is_enough_to_go_on(tmp_path: Path) -> None:
    hydra = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    folder = header(tmp_path / "s", hydra=hydra)
    where = f"hydra.sweep.dir={folder.path}"
    whole = ["seed=1,2", "+sweep=zero", *hydra, where]
    assert sweep_overrides([where]) == sweep_overrides([f"run.dir={folder.path}"]) == whole
    assert sweep_overrides(["sweep=zero", "seed=1,2", where]) == whole  # the same again, in any order
    # Another launcher takes the old one's keys with it.
    assert sweep_overrides([where, "hydra/launcher=basic"]) == [
        "seed=1,2",
        "+sweep=zero",
        "hydra/launcher=basic",
        where,
    ]
    new = f"hydra.sweep.dir={tmp_path / 'new'}"
    assert sweep_overrides([new, "seed=1,2"]) == ["seed=1,2", new]
    assert sweep_overrides(["seed=1,2"]) == ["seed=1,2"]


def test_another_sweep_is_refused_in_a_folder(tmp_path: Path) -> None:
    folder = header(tmp_path / "s")
    for given, line in (
        (["seed=1,2,3", "+sweep=zero"], "with seed=1,2 instead of seed=1,2,3; give only hydra.sweep.dir"),
        (["seed=1,2"], "with +sweep=zero instead of no sweep"),
        (
            ["seed=1,2", "+sweep=zero", "trainer.max_steps=5"],
            "with no trainer.max_steps instead of trainer.max_steps=5",
        ),
    ):
        with pytest.raises(ConfigError, match="holds another sweep") as error:
            sweep_overrides([*given, f"hydra.sweep.dir={folder.path}"])
        assert line in str(error.value)
    refuse_others(folder, ["+sweep=zero", "seed=1,2"])
    with pytest.raises(ConfigError, match="holds no sweep to continue"):
        sweep_overrides([f"hydra.sweep.dir={tmp_path / 'typo'}"])


def test_folders_that_cannot_be_a_sweeps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="is the folder of a run"):
        SweepFolder(tmp_path / "run").refuse()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; give a folder"):
        SweepFolder(tmp_path / "file" / "s").refuse()
    for text in ('{"version": 1, "swe', '{"version": 2, "sweep": {}}', "[]"):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(ConfigError, match=r"sweep.json is damaged or from another version"):
            assert SweepFolder(tmp_path).header


def test_two_sweeps_in_a_folder(tmp_path: Path) -> None:
    held = header(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"process {os.getpid()} on .* is running a sweep in it; wait, stop that process"
    ):
        header(tmp_path)
    with held.running(3) as free, SweepFolder(tmp_path).running(3) as second:
        assert (free, second) == (True, False)
    with held.running(3) as free:
        assert free


def test_records_round_trip_and_damaged_ones_run_again(tmp_path: Path) -> None:
    folder = header(tmp_path)
    whole = Record(10, "a", ["seed=1"], "ok", "", "d", 0, 2, "tensor 2", 1.5, {"loss": 2.0}, {"mfu": None}, "f")
    folder.keep(whole)
    newer = dataclasses.asdict(whole) | {"number": 9, "new": 1}
    (tmp_path / "records" / "9.json").write_text(json.dumps(newer))
    with folder.updating() as found:
        assert found == [dataclasses.replace(whole, number=9), whole]
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [cell["number"] for cell in content["cells"]] == [9, 10]
    assert content["sweep"]["cells"] == 2
    for text in ("", "{", "[]", '{"number": 9}'):
        (tmp_path / "records" / "9.json").write_text(text)
        assert folder.record(9) is None
    with folder.updating() as found:
        assert found == [whole]


def test_the_exit_code_of_a_sweep_follows_from_its_cells() -> None:
    def code(*found: str, received: int | None = None) -> int:
        return exit_code([Record(0, "", [], each, exit_code=143) for each in found], received)

    assert code("ok", "pruned", "out of memory") == 0
    assert code("ok", "failed", "out of memory") == 1
    assert code("failed", "interrupted") == 143
    assert code("failed", received=2) == 130


def test_a_sweep_whose_process_is_gone_is_deserted(tmp_path: Path) -> None:
    folder = header(tmp_path)
    assert not folder.deserted
    owner = (tmp_path / ".lock").read_text()
    (tmp_path / ".lock").write_text(owner.replace(str(os.getpid()), "999999999"))
    assert folder.deserted
    (tmp_path / ".lock").write_text("process 999999999 on another-machine\n")
    assert not folder.deserted


def test_memory_that_runs_out_is_told_from_other_errors() -> None:
    def wrapped(inner: Exception) -> Exception:
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("[Stage 0] failed to run forward") from error
        except RuntimeError as outer:
            return outer

    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 79.1 GiB of which 1.20 GiB is free."
    cpu = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."
    assert host_memory.out_of_memory(wrapped(RuntimeError(cuda))) == (
        "CUDA memory ran out: tried to allocate 2.50 GiB, 1.20 GiB free"
    )
    assert host_memory.out_of_memory(wrapped(RuntimeError(cpu))) == "host memory ran out: tried to allocate 1.0 MiB"
    assert host_memory.out_of_memory(MemoryError()) == "host memory ran out"
    assert host_memory.out_of_memory(OSError(12, "Cannot allocate memory")) == "host memory ran out"
    for other in (RuntimeError("Connection closed by peer"), ValueError("memory format"), KeyError("x")):
        assert host_memory.out_of_memory(wrapped(other)) == ""


def test_the_rank_whose_memory_ran_out_is_named() -> None:
    """By a rank's own word, by the kernel's, or by an abort near the limit; else it is a crash."""
    from gptlite.launch.elastic import _memory

    def failures(**codes: int) -> dict:
        return {int(rank[1:]): SimpleNamespace(exitcode=code) for rank, code in codes.items()}

    killed, aborted = failures(r0=1, r1=-signal.SIGKILL), failures(r0=-signal.SIGABRT, r1=1)
    assert (
        _memory([{}, {"out_of_memory": "host memory ran out"}], killed, False, set()) == "rank 1: host memory ran out"
    )
    assert _memory([{}, {}], killed, False, {1}) == ""
    assert _memory([{}, {}], killed, True, set()) == "rank 1: host memory ran out: killed by the kernel"
    assert _memory([{}, {}], failures(r0=1, r1=-signal.SIGTERM), True, set()) == ""
    assert _memory([{}, {}], aborted, False, {0, 1}).startswith("rank 0: host memory ran out: SIGABRT near trainer.")
    assert _memory([{}, {}], aborted, True, {1}) == ""


def test_what_was_in_use_is_known_after_an_abort(tmp_path: Path) -> None:
    file = tmp_path / "memory-0"
    assert not host_memory.was_near(file, 0.5)
    code = (
        "import sys, os, time\nfrom pathlib import Path\nfrom gptlite.launch.host_memory import note_use\n"
        "note_use(Path(sys.argv[1]))\nx = bytearray(2**28)\ntime.sleep(0.3)\nos.abort()\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)]).returncode == -signal.SIGABRT
    assert host_memory.was_near(file, 0.25)
    assert host_memory.was_near(file, 0.3)
    assert not host_memory.was_near(file, 0.5)
    assert not host_memory.was_near(file, None)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_the_limit_is_of_this_process_and_can_be_lifted() -> None:
    code = (
        "from gptlite.launch.host_memory import limit, lift, out_of_memory\n"
        "limit(0.25)\n"
        "try:\n    bytearray(2**28)\nexcept MemoryError as error:\n    print(out_of_memory(error))\n"
        "lift()\nprint(len(bytearray(2**28)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["host memory ran out", str(2**28)]


def test_the_limit_must_be_a_size() -> None:
    assert load([*SMALL, "trainer.host_memory_limit=0.5"]).trainer.host_memory_limit == 0.5
    for value in ("0", "-1", "inf"):
        with pytest.raises(ConfigError, match=r"must be above 0 \(GiB per rank\)"):
            load([*SMALL, f"trainer.host_memory_limit={value}"])
