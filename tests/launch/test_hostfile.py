"""`train --hostfile FILE`: torchrun's command of each machine, and one line for a file that cannot be right."""

import os
import socket
import sys
from pathlib import Path

import pytest

from gptlite.commands import train
from gptlite.errors import ConfigError
from gptlite.launch import hostfile
from gptlite.launch.hostfile import Host, names_this_machine, read_hosts, refuse_used_port, this_machine, torchrun

HERE = socket.gethostname()
RUN = ["data=synthetic", "model.num_layers=4", "parallelism=tp2", "parallelism.data=3"]
BATCH = ["data.global_batch_size=6", "data.micro_batch_size=1"]


class Became(Exception):
    """The command that a process would have become."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`gptlite train --hostfile FILE WORDS...`; gives torchrun's arguments. The file has a text."""

    def execute(path: str, arguments: list[str]) -> None:
        raise Became(arguments)

    def start(text: str, *words: str, form: str = "--hostfile {}") -> list[str]:
        (tmp_path / "hosts").write_text(text)
        monkeypatch.setattr(hostfile.os, "execv", execute)
        monkeypatch.setattr(hostfile, "refuse_used_port", lambda port: None)  # another test may use port 29500
        monkeypatch.setattr(sys, "argv", ["train.py", *form.format(tmp_path / "hosts").split(), *words])
        with pytest.raises(Became) as became:
            train.command()
        assert became.value.args[0][0] == sys.executable
        return became.value.args[0][1:]

    return start


def test_comments_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# all\n\nnode1 slots=8 # fast\n  node2   slots = 4\n10.0.0.3 slots=1\n")
    assert read_hosts(tmp_path / "hosts") == [Host("node1", 8), Host("node2", 4), Host("10.0.0.3", 1)]


@pytest.mark.parametrize("form", ["--hostfile {}", "--hostfile={}"])
def test_the_first_machine_runs_its_ranks_and_prints_the_others_commands(command, capsys, form: str) -> None:
    words = [*RUN, *BATCH, "run.name='a b'"]
    given = command(f"{HERE} slots=2\nnode2 slots=3\nnode3 slots=1\n", *words, form=form)
    fixed = [f"--master-addr={HERE}", "--master-port=29500"]
    assert given[:7] == ["-m", "torch.distributed.run", "--nnodes=3", "--node-rank=0", "--nproc-per-node=2", *fixed]
    assert given[-len(words) :] == words
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["on node2", "on node3"]
    assert f"--node-rank=1 --nproc-per-node=3 --master-addr={HERE} --master-port=29500" in lines[0]
    assert "--node-rank=2 --nproc-per-node=1" in lines[1]
    assert lines[0].endswith("""'run.name='"'"'a b'"'"''""")  # as a shell reads it


def test_the_port_is_chosen_for_all_machines(command, capsys) -> None:
    given = command(f"{HERE} slots=2\nnode2 slots=4\n", *RUN, *BATCH, form="--hostfile {} --master-port=29612")
    assert "--master-port=29612" in given
    assert "--master-port=29612" in capsys.readouterr().out
    assert not any("29500" in each for each in given)


def test_a_port_in_use_is_refused_with_another_one() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {port} of this machine: address already in use; .*port="):
            refuse_used_port(port)
    refuse_used_port(port)


def test_another_machine_runs_its_own_and_prints_nothing(command, capsys) -> None:
    given = command(f"node1 slots=4\n{HERE} slots=2\n", *RUN, *BATCH)
    assert given[2:5] == ["--nnodes=2", "--node-rank=1", "--nproc-per-node=2"]
    assert "--master-addr=node1" in given
    assert capsys.readouterr().out == ""


def test_one_machine_may_be_called_localhost(command) -> None:
    assert "--nnodes=1" in command("localhost slots=6\n", *RUN, *BATCH)


def test_the_installed_command_is_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "arguments", lambda name: ["-m", "gptlite", name])
    assert torchrun([Host("a", 1)], 0, 29500, ["seed=1"])[-4:] == ["-m", "gptlite", "train", "seed=1"]


def test_names_of_this_machine() -> None:
    assert names_this_machine(HERE)
    assert names_this_machine("127.0.0.1")
    assert not names_this_machine("192.0.2.1")  # a documentation address (RFC 5737)
    assert not names_this_machine("nowhere.invalid")


WRONG = {
    "": r"hosts lists no host; give a line `HOST slots=RANKS`",
    "# none\n": r"hosts lists no host",
    "node1\n": r"line 1: 'node1' is not HOST slots=RANKS; write e.g. node1 slots=8",
    "node1 8\n": r"line 1: 'node1 8' is not",
    "\nnode1 slots=0\n": r"line 2: 'node1 slots=0' is not",
    "node1 slots=two\n": r"line 1: 'node1 slots=two' is not",
    "node1 slots=2 max_slots=4\n": r"line 1: .* is not HOST slots=RANKS",
    f"{HERE} slots=4\nnode2 slots=1\n{HERE} slots=1\n": rf"line 3: {HERE} is listed twice; write one line",
    "node2 slots=3\nnode3 slots=3\n": rf"this machine, {HERE}, is not among node2, node3; add a line for it",
    f"{HERE} slots=3\nlocalhost slots=3\n": r"other machines cannot reach localhost; give this machine's name",
    "127.0.0.1 slots=3\nnode2 slots=3\n": r"other machines cannot reach 127\.0\.0\.1",
    f"{HERE} slots=4\nnode2 slots=4\n": r"hosts has 8 slots on 2 machines: world size 8 is not .*parallelism\.tensor=2",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py", *RUN, *BATCH, "--hostfile", str(tmp_path / "hosts")])
    with pytest.raises(ConfigError, match=WRONG[text]) as refused:
        train.command()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hostfile"], "--hostfile has no value; give a file"),
        (["--hostfile="], "--hostfile has no value; give a file"),
        (["--hostfile", "--cfg"], "--hostfile has no value; give a file"),
        (["--hostfile", "nowhere"], "--hostfile=nowhere cannot be read: No such file or directory; give"),
        (["--hostfile", "a", "--hostfile", "b"], "--hostfile is given twice"),
        (["--hostfile", "a", "-m", "seed=1,2"], "--hostfile trains a single run; leave out -m"),
        (["--hostfile", "a", "--master-port"], "--master-port has no value; give a port"),
        (["--hostfile", "a", "--master-port=http"], "--master-port=http is not a port; give a number from 1 to 65535"),
        (["--hostfile", "a", "--master-port", "65536"], "--master-port=65536 is not a port"),
        (["--master-port=29501"], "--master-port=29501 has no use without --hostfile"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(ConfigError, match=message):
        train.command()


def test_two_names_of_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"hosts: a and b are all this machine"):
        this_machine([Host("a", 1), Host("b", 1)], "hosts", lambda name: True)


def test_torchrun_has_no_host_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if name.endswith("RANK") else "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(
        ConfigError, match="--hostfile=hosts has no use under torchrun, which has already started the ranks"
    ):
        hostfile.run("hosts", 29500, [])


def test_hosts_of_an_elastic_run_meet_by_a_rendezvous(command, capsys) -> None:
    """The number of slots need not be that of a layout, and each world of the run has a store."""
    words = [*RUN[:3], "parallelism.elastic=true", *BATCH]
    given = command(f"{HERE} slots=2\nnode2 slots=2\n", *words)
    assert given[:5] == ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=100"]
    assert given[5:8] == ["--rdzv-backend=c10d", f"--rdzv-endpoint={HERE}:29500", "--rdzv-id=29500"]
    assert given[8].endswith("is_host=1")
    assert os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    (line,) = capsys.readouterr().out.splitlines()
    assert " && TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " in line
    assert "is_host=0" in line


def test_hosts_of_an_elastic_run_have_equal_slots() -> None:
    with pytest.raises(ConfigError, match="needs equal slots on all machines, not "):
        hostfile.elastic_torchrun([Host(HERE, 2), Host("node2", 1)], 0, 29500, [])
