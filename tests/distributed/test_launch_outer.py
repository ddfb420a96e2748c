"""Ranks that torchrun or srun have started, on one machine and on two."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from marking import marked

from distributed.cells.commands import HERE, OUTER, RANK, TRAIN, Run, Start, free_port, losses, training
from gptlite.errors import ConfigError
from gptlite.launch import starter
from gptlite.launch.starter import first_host

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@pytest.mark.slow
def test_a_refusal_under_torchrun_is_one_line(start: Start, tmp_path: Path) -> None:
    """By the variables that torchrun sets, without it."""
    runs = []
    for rank in ("0", "1"):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        runs.append(start(TRAIN, "parallelism.tensor=5", f"run.dir={tmp_path / 'a'}", env=env))
    code, output, errors = runs[0].end()
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert runs[1].end() == (2, "", "")  # a few seconds later: torchrun ends all at the first
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
    ],
    ids=["torchrun", "srun"],
)
def test_a_sweep_is_refused_under_another_launcher(start: Start, tmp_path: Path, env: dict[str, str]) -> None:
    code, output, errors = start(TRAIN, "-m", "seed=1,2", env=env).end()
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("error: --multirun under ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[03-06,09],gpu1", "node03"),
        ("rack1-[2,5],rack2-1", "rack1-2"),
        ("a,b", "a"),
        ("r[1-2]n[07-09]", "r1n07"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def slurm(**more: str) -> dict[str, str]:
    variables = {"PROCID": "5", "LOCALID": "1", "NTASKS": "7", "STEP_ID": "2", "JOB_ID": "1234567"}
    return {f"SLURM_{key}": value for key, value in (variables | more).items()}


def test_srun_is_seen_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in OUTER or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    assert starter.starter() is None
    for name, value in slurm(JOB_NODELIST="n[3-5]", TASKS_PER_NODE="3,2(x2)", NODEID="1").items():
        monkeypatch.setenv(name, value)
    found = starter.starter()
    assert found is not None
    assert (found.name, found.rank, found.world_size, found.local_rank, found.local_world_size) == ("srun", 5, 7, 1, 2)
    assert found.master_address == "n3"
    assert 15000 <= found.master_port < 30000
    monkeypatch.setenv("SLURM_NTASKS", "1")  # a batch script, or one task: it starts its ranks itself
    assert starter.starter() is None
    monkeypatch.setenv("SLURM_NTASKS", "many")
    with pytest.raises(ConfigError, match="SLURM_NTASKS=many"):
        starter.starter()


def srun_env() -> list[dict[str, str]]:
    """What srun sets for two ranks, and a port of theirs."""
    port = free_port()
    return [slurm(PROCID=i, LOCALID=i, NTASKS="2", TASKS_PER_NODE="2") | {"MASTER_PORT": port} for i in ("0", "1")]


@pytest.fixture(params=["torchrun", "srun"])
def outer(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Callable[..., list[Run]]:
    """Starts two ranks with a behaviour: by torchrun, or two processes as srun starts them."""

    def run(behaviour: str, *overrides: str) -> list[Run]:
        common = [RANK, behaviour, "data=synthetic", f"run.dir={tmp_path / 'run'}", "run.name=x", *overrides]
        if request.param == "torchrun":
            return [start(*TORCHRUN, "--nproc-per-node=2", *common)]
        return [start(*common, env=env) for env in srun_env()]

    return run


def ends(runs: list[Run]) -> tuple[list[int], str, str]:
    """The exit codes, and all that was printed on standard output and standard error."""
    codes, output, errors = zip(*(run.end() for run in runs), strict=True)
    return list(codes), "".join(output), "".join(errors)


@pytest.mark.slow
def test_ranks_of_another_launcher_have_one_configuration(outer: Callable, tmp_path: Path) -> None:
    codes, output, _ = ends(outer("fine", "trainer.max_steps=5"))
    assert (set(codes), output) == ({0}, "rank 0 prints, tty False, seed 0\n")
    log = (tmp_path / "run" / "ranks" / "rank-1.log").read_text()
    assert log == "rank 1 prints, tty False, seed 0\nrank 1 warns\n"


@pytest.mark.slow
def test_the_second_machines_terminal_shows_where_output_is(start: Start, tmp_path: Path) -> None:
    """Two of torchrun's launchers on this machine, with two ranks each."""
    machines = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost"]
    overrides = ["fine", "data=synthetic", f"run.dir={tmp_path / 'run'}", "trainer.max_steps=5"]
    machines.append(f"--master-port={free_port()}")
    runs = [start(*machines, f"--node-rank={number}", RANK, *overrides) for number in (0, 1)]
    (code, _, first), (other, output, second) = (run.end() for run in runs)
    assert (code, other) == (0, 0), (first, second)
    line = f"ranks 2 to 3 of 4 train here; their output is in {tmp_path / 'run' / 'ranks'}\n"
    assert (output, second.count(line)) == ("", 1), second
    assert "train here" not in first
    assert "rank 3 prints" in (tmp_path / "run" / "ranks" / "rank-3.log").read_text()


@pytest.mark.slow
def test_another_launchers_rank_says_why_it_failed(outer: Callable, tmp_path: Path) -> None:
    codes, _, errors = ends(outer("raise1"))
    assert set(codes) == {1}
    log = tmp_path / "run" / "ranks" / "rank-1.log"
    words = "ValueError: the weights are upside down"
    place = re.escape(f"; its output is in {log}")
    assert re.search(rf"^rank 1 failed: {words} \(launch_rank\.py:\d+\){place}$", errors, re.MULTILINE)
    assert words in log.read_text()


@pytest.mark.slow
def test_another_launchers_request_to_stop_saves_once(outer: Callable, tmp_path: Path) -> None:
    runs = outer("fine", "trainer.max_steps=1000")
    for run in runs:
        run.until(*training(tmp_path))
    for pid in [pid for run in runs for pid in (*run.left(), run.process.pid)]:  # all found before the first is told
        os.kill(pid, signal.SIGTERM)
    codes, _, errors = ends(runs)
    assert errors.count("SIGTERM: saving after this step") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(runs) == 1 or codes == [143, 143]  # torchrun has an exit code of its own


@pytest.mark.slow
def test_torchrun_makes_one_run_folder(start: Start, tiny: list[str], tmp_path: Path, whole: Callable) -> None:
    code, output, errors = start(*TORCHRUN, "--nproc-per-node=2", TRAIN, *tiny, "parallelism.tensor=2").end()
    assert code == 0, errors
    assert output.count("step 8/8") == 1
    # The planned memory, for which rank 0 simulates ranks before it joins the group, is the measured one.
    planned, measured = (
        [" ".join(each.split()) for each in re.findall(r"(?:parameters|gradients|optimizer)\s+\S+\s+[KM]iB", part)]
        for part in output.split("step 8/8")
    )
    assert planned == measured
    assert len(planned) == 3
    (folder,) = (tmp_path / "outputs").iterdir()
    assert losses(folder) == pytest.approx(whole(), rel=1e-5)


@pytest.mark.slow
def test_torchrun_with_one_rank(start: Start, tiny: list[str], tmp_path: Path) -> None:
    code, _, errors = start(*TORCHRUN, "--nproc-per-node=1", TRAIN, *tiny, "trainer.max_steps=2").end()
    assert code == 0, errors
    assert len(list((tmp_path / "outputs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
        (["parallelism.tensor=2", "parallelism.data=2"], "world size 2 "),
        (["parallelism.tensor=2", "checkpoint.resume=nowhere"], "checkpoint.resume=nowhere"),
        (["-m", "seed=1,2"], "--multirun under torchrun"),
    ],
)
def test_torchrun_with_wrong_input(start: Start, tiny: list[str], overrides: list[str], named: str) -> None:
    code, output, errors = start(*TORCHRUN, "--nproc-per-node=2", TRAIN, *tiny, *overrides).end()
    assert code == 1  # torchrun's
    assert all(line.endswith(" so far") for line in output.splitlines())  # of a slow start
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert named in said[0]
    assert "exitcode  : 2 " in errors


@pytest.mark.slow
def test_srun_trains(start: Start, tiny: list[str], tmp_path: Path, whole: Callable) -> None:
    codes, _, errors = ends([start(TRAIN, *tiny, "parallelism.pipeline=2", env=env) for env in srun_env()])
    assert codes == [0, 0], errors
    (folder,) = (tmp_path / "outputs").iterdir()
    assert losses(folder) == pytest.approx(whole(), rel=1e-5)


MACHINES = {
    "pp2-dp2": ["parallelism.pipeline=2", "parallelism.zero=1"],
    "tp2-pp2": ["parallelism.tensor=2", "parallelism.pipeline=2"],
    "tp2-dp2": ["parallelism.tensor=2", "parallelism.zero=3"],
    "hsdp": ["parallelism.zero=2", "parallelism.dp_replicate=2"],
}
ON_MACHINES = [("pp2-dp2", False), ("tp2-dp2", True), *product([*MACHINES][1:], [False])]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
@pytest.mark.parametrize(("layout", "in_a_file"), marked(ON_MACHINES, slow=2))
def test_two_machines_train_as_one_process(
    start: Start, tiny: list[str], tmp_path: Path, whole: Callable, layout: str, in_a_file: bool
) -> None:
    """With torchrun on both, or one command on both, which find themselves in a file by their addresses."""
    folder, hosts = tmp_path / "a", tmp_path / "hosts"
    hosts.write_text("10.77.0.1 slots=2\n10.77.0.2 slots=2\n")
    given = ["--hostfile", str(hosts)] if in_a_file else []
    batch = ["data.micro_batch_size=1", "data.global_batch_size=8"]
    command = [*given, *tiny, *batch, *MACHINES[layout], f"run.dir={folder}"]
    code, output, errors = start(str(HERE / "two_machines.py"), *command).end()
    assert code == 0, errors
    assert output.count("step 8/8") == 1
    assert output.count("on 10.77.0.2:  cd ") == in_a_file
    assert losses(folder) == pytest.approx(whole(*batch), rel=1e-5)
    assert len(list((folder / "ranks").iterdir())) == 3
