"""Starting, ending and losing the ranks of train.py, with a stand-in for training: launch_rank.py."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from marking import marked

from distributed.cells.commands import Start, seconds_since, training
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.start.run import launch_command


@pytest.mark.slow
def test_rank_0_keeps_the_terminal_and_the_other_a_log(ranks: Start, tmp_path: Path) -> None:
    terminal, slave = os.openpty()
    run = ranks("fine", "trainer.max_steps=5", stdout=slave)
    os.close(slave)
    code, _, errors = run.end()
    said = os.read(terminal, 10000).decode()
    os.close(terminal)
    assert (code, said, errors) == (0, "rank 0 prints, tty True, seed 1234\r\n", "rank 0 warns\n")
    assert (
        tmp_path / "run" / "ranks" / "rank-1.log"
    ).read_text() == "rank 1 prints, tty False, seed 1234\nrank 1 warns\n"
    assert not list((tmp_path / "run" / "ranks").glob("rank-0*"))


@pytest.mark.parametrize(
    ("behaviour", "named"),
    marked(
        [
            ("raise1", "rank 1 failed: ValueError: the weights are upside down"),
            # Rank 0 is where no Python answers a signal.
            ("stuck1", "rank 1 failed: ValueError: the weights are upside down"),
            ("kill0", "rank 0 was killed by SIGKILL"),
            ("memory1", "rank 1: host memory ran out"),
            ("raise0", "rank 0 failed: ValueError: the weights are upside down"),
            ("raise", "failed: ValueError: the weights are upside down"),
            ("kill1", "rank 1 was killed by SIGKILL"),
            ("segfault1", "rank 1 was killed by SIGSEGV"),
        ],
        slow=4,
    ),
)
def test_the_rank_that_failed_is_named(ranks: Start, tmp_path: Path, behaviour: str, named: str) -> None:
    code, _, errors = ranks(behaviour).end()
    assert seconds_since(tmp_path / "run" / "acted") < 15
    assert code == 1
    first, *others = [line for line in errors.splitlines() if not line.endswith("warns")]
    assert named in first
    if behaviour == "raise1":
        assert "  ValueError: the weights are upside down" in others
        assert others[-1] == f"  its output: {tmp_path / 'run' / 'ranks' / 'rank-1.log'}"
        assert "Traceback" in (tmp_path / "run" / "ranks" / "rank-1.log").read_text()
    if behaviour == "memory1":
        assert "tried to allocate" in first


@pytest.mark.slow
def test_a_killed_rank_starts_again_from_the_last_checkpoint(ranks: Start, tmp_path: Path) -> None:
    code, output, errors = ranks("kill1", "trainer.max_restarts=1", "trainer.max_steps=9").end()
    assert code == 0, errors
    assert "rank 1 was killed by SIGKILL" in errors
    assert "restarting the ranks (1 of 1)" in errors
    assert output.count("rank 0 prints") == 2
    assert (tmp_path / "run" / "checkpoints" / "step-9").exists()
    assert (tmp_path / "run" / "ranks" / "rank-1.log").read_text().count("rank 1 prints") == 2


@pytest.mark.slow
def test_a_refusal_is_one_line_and_not_tried_again(ranks: Start, tmp_path: Path) -> None:
    code, output, errors = ranks("refuse", "trainer.max_restarts=3").end()
    assert (code, errors) == (2, "error: model.num_layers=7: not with this test\n")
    assert all(line.endswith(" so far") for line in output.splitlines())  # of a slow start
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_request_to_stop_saves_once(ranks: Start, tmp_path: Path) -> None:
    run = ranks("fine", "trainer.max_restarts=1")
    run.until(*training(tmp_path))
    # As a batch system may do it: to every process of the job, and the launcher tells the ranks too.
    for pid in (*run.left(), run.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, _, errors = run.end()
    assert code == 143, errors
    assert errors.count("SIGTERM: saving after this step") == 1
    assert "failed" not in errors
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(ranks: Start, tmp_path: Path) -> None:
    run = ranks("fine")
    run.until(*training(tmp_path))
    os.killpg(run.process.pid, signal.SIGINT)
    code, _, errors = run.end()
    assert (code, errors.count("SIGINT: saving after this step")) == (130, 1)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(ranks: Start, tmp_path: Path) -> None:
    run = ranks("stubborn")
    run.until(*training(tmp_path))
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    assert run.process.poll() is None
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_before_training_ends_it_quietly(ranks: Start, tmp_path: Path, number: int) -> None:
    run = ranks("prepare")
    run.until(tmp_path / "preparing-0", tmp_path / "preparing-1")
    run.process.send_signal(number)
    began = time.monotonic()
    assert run.end() == (128 + number, "", "")
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_request_while_ranks_start(ranks: Start, tmp_path: Path) -> None:
    run = ranks("fine")
    while not run.left():
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    code, _, errors = run.end()
    # However far the ranks were: not started, starting, or in their first step (and then that is saved).
    saved = "rank 0 warns\n\nSIGINT: saving after this step (a second signal stops at once)\n"
    assert (code, errors) in [(130, ""), (130, "stopped\n"), (130, saved)]


def test_ranks_die_with_their_launcher(ranks: Start, tmp_path: Path) -> None:
    run = ranks("fine")
    run.until(*training(tmp_path))
    assert len(run.left()) == 2
    run.process.kill()
    deadline = time.monotonic() + 5
    while run.left():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = load(["data=synthetic", "parallelism.tensor=2", "parallelism.pipeline=2", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"4 ranks on this machine, which has 3 GPUs; .*CUDA_VISIBLE_DEVICES= "):
        launch_command(config, 0.0)
    assert list(tmp_path.iterdir()) == []
