"""Ranks that torchrun or srun have started, on one machine and on two."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from marking import marked

from distributed.launch_command import HERE, OUTER, RANK, TRAIN, Start, losses, training
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


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def outer_command(kind: str, folder: Path, behaviour: str, *overrides: str) -> tuple[list[list[str]], list[dict]]:
    """What starts two ranks: torchrun, or two processes as srun starts them."""
    common = [behaviour, "data=synthetic", f"run.dir={folder / 'run'}", "run.name=x", *overrides]
    if kind == "torchrun":
        return [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", RANK, *common]], [{}]
    port = free_port()
    env = [slurm(PROCID=str(i), LOCALID=str(i), NTASKS="2", TASKS_PER_NODE="2") | {"MASTER_PORT": port} for i in (0, 1)]
    return [[RANK, *common]] * 2, env


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "srun"])
def test_ranks_of_another_launcher_have_one_configuration(start: Start, tmp_path: Path, kind: str) -> None:
    commands, env = outer_command(kind, tmp_path, "fine", "trainer.max_steps=5")
    runs = [start(*command, env=more) for command, more in zip(commands, env, strict=True)]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0] * len(runs)
    assert "".join(output for _, output, _ in ends) == "rank 0 prints, tty False, seed 0\n"
    log = (tmp_path / "run" / "ranks" / "rank-1.log").read_text()
    assert log == "rank 1 prints, tty False, seed 0\nrank 1 warns\n"


@pytest.mark.slow
def test_the_second_machines_terminal_shows_where_output_is(start: Start, tmp_path: Path) -> None:
    """Two of torchrun's launchers on this machine, with two ranks each."""
    machines = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost"]
    overrides = ["fine", "data=synthetic", f"run.dir={tmp_path / 'run'}", "trainer.max_steps=5"]
    machines.append(f"--master-port={free_port()}")
    runs = [start(*machines, f"--node-rank={number}", RANK, *overrides) for number in (0, 1)]
    (_, _, first), (_, output, second) = ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    line = f"ranks 2 to 3 of 4 train here; their output is in {tmp_path / 'run' / 'ranks'}\n"
    assert (output, second.count(line)) == ("", 1), second
    assert "train here" not in first
    assert "rank 3 prints" in (tmp_path / "run" / "ranks" / "rank-3.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "srun"])
def test_another_launchers_rank_says_why_it_failed(start: Start, tmp_path: Path, kind: str) -> None:
    commands, env = outer_command(kind, tmp_path, "raise1")
    runs = [start(*command, env=more) for command, more in zip(commands, env, strict=True)]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [1] * len(runs)
    log = tmp_path / "run" / "ranks" / "rank-1.log"
    errors = "".join(errors for _, _, errors in ends)
    assert f"rank 1 failed: ValueError: the weights are upside down; its output is in {log}\n" in errors
    assert "ValueError: the weights are upside down" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "srun"])
def test_another_launchers_request_to_stop_saves_once(start: Start, tmp_path: Path, kind: str) -> None:
    commands, env = outer_command(kind, tmp_path, "fine", "trainer.max_steps=1000")
    runs = [start(*command, env=more) for command, more in zip(commands, env, strict=True)]
    for run in runs:
        run.until(*training(tmp_path))
    for run in runs:
        for pid in (*run.left(), run.process.pid):
            os.kill(pid, signal.SIGTERM)
    ends = [run.end() for run in runs]
    assert "".join(errors for _, _, errors in ends).count("SIGTERM: saving after this step") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    if kind == "srun":  # torchrun has an exit code of its own
        assert [code for code, _, _ in ends] == [143, 143]


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
    assert output == ""
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert named in said[0]
    assert "exitcode  : 2 " in errors


@pytest.mark.slow
def test_srun_trains(start: Start, tiny: list[str], tmp_path: Path, whole: Callable) -> None:
    _, env = outer_command("srun", tmp_path, "")
    runs = [start(TRAIN, *tiny, "parallelism.pipeline=2", env=more) for more in env]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    (folder,) = (tmp_path / "outputs").iterdir()
    assert losses(folder) == pytest.approx(whole(), rel=1e-5)


MACHINES = {
    "pp2-dp2": ["parallelism.pipeline=2", "parallelism.zero=1"],
    "tp2-pp2": ["parallelism.tensor=2", "parallelism.pipeline=2"],
    "tp2-dp2": ["parallelism.tensor=2", "parallelism.zero=3"],
    "hsdp": ["parallelism.zero=2", "parallelism.dp_replicate=2"],
}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
@pytest.mark.parametrize("layout", marked(list(MACHINES), slow=1))
def test_two_machines(start: Start, tiny: list[str], tmp_path: Path, whole: Callable, layout: str) -> None:
    script, folder = str(HERE / "two_machines.py"), tmp_path / "a"
    batch = ["data.micro_batch_size=1", "data.global_batch_size=8"]
    code, output, errors = start(script, *tiny, *batch, *MACHINES[layout], f"run.dir={folder}").end()
    assert code == 0, errors
    assert output.count("step 8/8") == 1
    assert losses(folder) == pytest.approx(whole(*batch), rel=1e-5)
    assert len(list((folder / "ranks").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
def test_two_machines_of_a_host_file(start: Start, tiny: list[str], tmp_path: Path, whole: Callable) -> None:
    """One command on both, which find themselves in the file by their addresses."""
    script, folder, hosts = str(HERE / "two_machines.py"), tmp_path / "a", tmp_path / "hosts"
    hosts.write_text("10.77.0.1 slots=2\n10.77.0.2 slots=2\n")
    words = ["data.micro_batch_size=1", "data.global_batch_size=8", *MACHINES["tp2-dp2"]]
    code, output, errors = start(script, "--hostfile", str(hosts), *tiny, *words, f"run.dir={folder}").end()
    assert code == 0, errors
    assert output.count("step 8/8") == 1
    assert output.count("on 10.77.0.2:  cd ") == 1
    assert losses(folder) == pytest.approx(whole(*words[:2]), rel=1e-5)
