"""Ranks that stop, hang, differ or lag are named, in real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marking import marked
from run_files import read_metrics
from torch import nn

from distributed.ranks import RankFailed, Ranks, run_ranks
from gptlite.config import CONF_DIR, load
from gptlite.parallelism import stack
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.comm_time import KINDS, summary
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.flight_recorder import shares_of
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.replicas import ReplicasDiffer, check_replicas, fingerprint
from gptlite.parallelism.tensor import cut, leave, tensor_axis
from gptlite.parallelism.verdict import Word, judge, rank_words
from gptlite.parallelism.watchdog import Watch
from gptlite.pretrain import pretrain
from gptlite.trainer import loop

THIS = "distributed.test_watch"
LIMIT = 6.0  # seconds
FOUR = Mesh(torch.device("cpu"), Layout((2, 1, 1, 2)))  # pipeline 2 x tensor 2


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


# A rank that keeps the others waiting.


def wait_for_rank_1(how: str, axis: str) -> None:
    """Rank 0 waits along an axis for rank 1, which does something else."""
    mesh = build_mesh(ParallelismConfig(tensor=2))
    watch = Watch(mesh, LIMIT)
    all_reduce(torch.ones(4), mesh)  # all watch
    with watch.step(7):
        if mesh.rank == 1:
            loiter(how)
        elif axis == "tp":
            tensor = tensor_axis(mesh, sequence=False, overlap=False)
            assert tensor is not None
            leave(torch.ones(1, 2, 4), tensor)
        else:
            all_reduce(torch.ones(4), mesh)


def loiter(how: str) -> None:
    if how == "stop":
        time.sleep(1.5)  # a last word
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "axis", "words"),
    [
        ("stop", "tp", "has said nothing for "),
        pytest.param("sleep", "world", "keeps the others waiting: for ", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stops_or_hangs_is_named(how: str, axis: str, words: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, f"{THIS}:wait_for_rank_1", how, axis, timeout=150)
    assert failure.value.rank == 0
    line = next(line for line in str(failure.value).splitlines() if line.startswith("error: "))
    assert line.startswith("error: rank 1 (")
    assert words in line
    assert "step 7, in loiter (" in line
    assert line.endswith(f"; rank 0 waits in all_reduce over {axis}")


@pytest.mark.slow
def test_rank_0_is_named_though_it_holds_the_store() -> None:
    port = str(free_port())
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    with pytest.raises(
        RankFailed, match=r"error: rank 0 \(.* has said nothing for .* rank 1 waits in all_reduce over world"
    ):
        run_ranks(2, f"{THIS}:wait_for_rank_0", env=env, timeout=150)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for_rank_0() -> None:
    mesh = build_mesh(ParallelismConfig(tensor=2))
    watch = Watch(mesh, LIMIT)
    all_reduce(torch.ones(4), mesh)  # all watch
    with watch.step(1):
        if mesh.rank == 0:
            loiter("stop")
        all_reduce(torch.ones(4), mesh)


@pytest.mark.parametrize(("layout", "victim"), marked([("tp2", 1), ("tp2", 0), ("tp2_pp2", 2)], slow=1))
def test_a_stopped_rank_of_a_run_is_named_and_nothing_is_left(tiny: list[str], tmp_path, layout: str, victim: int):
    limit, run_dir = 10, tmp_path / "run"
    options = [f"parallelism={layout}", f"parallelism.timeout_seconds={limit}", f"run.dir={run_dir}", "run.name=x"]
    command = [sys.executable, str(CONF_DIR.parent / "train.py"), *tiny, *options, "trainer.max_steps=100000"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WATCH_TEST": str(tmp_path)}
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True)
    try:
        rows = run_dir / "metrics.jsonl"
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") > 3, 120, run)
        before = sorted(run_dir.glob("checkpoints/*"))
        os.kill(ranks_of(tmp_path)[victim], signal.SIGSTOP)
        stopped = time.monotonic()
        logs = [tmp_path / "said", *run_dir.glob("ranks/*.log")]
        wait_until(lambda: any(f"error: rank {victim} (" in log.read_text() for log in logs), 60, run)
        assert time.monotonic() - stopped < limit
        assert run.wait(60) == 1
        assert ranks_of(tmp_path) == {}
    finally:
        for pid in (*ranks_of(tmp_path).values(), run.pid):
            if run.poll() is None or pid != run.pid:
                os.kill(pid, signal.SIGKILL)
        run.wait()
    text = (tmp_path / "said").read_text()
    assert "has said nothing for" in text
    assert "wait" in text.partition("has said nothing for")[2]
    assert sorted(run_dir.glob("checkpoints/*")) == before
    if victim:
        assert json.loads((run_dir / "result.json").read_text())["status"].startswith(f"failed: rank {victim} (")


def wait_until(done, seconds: float, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(folder: Path) -> dict[int, int]:
    """The processes of a run that are ranks, by rank."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                env = dict(e.partition("=")[::2] for e in (process / "environ").read_bytes().decode().split("\0"))
                if env.get("WATCH_TEST") == str(folder) and "\nState:\tZ" not in (process / "status").read_text():
                    found[int(env["RANK"])] = int(process.name)
            except (OSError, KeyError):
                pass
    return found


# Who is to blame, from the ranks' words.

WAITING = Word(0, "a", 10, 5, 100.0, 12, "collective", "all_reduce", "tp", "forward, in f (m.py:1)", 20.0)
WORKING = replace(WAITING, waits="", collective="", axis="", words="in load (d.py:2)", since=21.0)


def word(rank: int, like: Word = WAITING, **changes) -> Word:
    return replace(like, rank=rank, pid=10 + rank, **changes)


def old(words: list[Word]) -> list[Word]:
    return [replace(each, beat=each.beat - 2) for each in words]


def test_the_silent_rank_is_to_blame_and_the_others_places_are_said():
    now = [word(0), word(1), word(2, collective="", axis="pp"), word(3, time=79.0)]
    before = [*old(now[:3]), now[3]]
    verdict = judge(before, now, now=110.0)
    assert verdict.text == (
        "rank 3 (a, pid 13) has said nothing for 31 s; its last word: step 12, forward, in f (m.py:1); "
        "ranks 0-1 wait in all_reduce over tp, rank 2 waits in send or receive over pp"
    )
    assert verdict.silent == (now[3],)


def test_without_silence_it_is_the_rank_that_waits_for_none():
    now = [word(0), word(1, like=WORKING)]
    assert judge(old(now), now, 110.0).text == (
        "rank 1 (a, pid 11) keeps the others waiting: for 21 s step 12, in load (d.py:2); "
        "rank 0 waits in all_reduce over tp"
    )
    # One that waits for rank 0's word in the store is none of those.
    now = [word(0, like=WORKING), word(1), word(2, waits="store")]
    assert judge(old(now), now, 110.0).text.startswith("rank 0 (a, pid 10) keeps the others waiting")


def test_a_deadlock_and_a_rank_that_never_spoke():
    now = [word(0), word(1, collective="recv", axis="pp")]
    assert judge(old(now), now, 110.0).text == (
        "rank 0 waits in all_reduce over tp, rank 1 waits in recv over pp; "
        "none is behind: they wait for each other, or the network between them fails"
    )
    assert (
        judge([None, None], [now[0], None], 110.0).text == "nothing yet from rank 1; rank 0 waits in all_reduce over tp"
    )
    assert rank_words([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_words_survive_the_store():
    assert Word.read(str(WAITING)) == WAITING


def test_a_place_says_the_phase_and_the_line():
    source = "def forward(event):\n    standing.set()\n    hold(event)\ndef evaluate(event):\n    forward(event)\n"
    standing, done = threading.Event(), threading.Event()
    scope = {"standing": standing, "hold": lambda event: event.wait(30)}
    exec(compile(source, "/somewhere/gptlite/model/trunk.py", "exec"), scope)
    thread = threading.Thread(target=scope["evaluate"], args=(done,))
    thread.start()
    standing.wait(30)
    assert thread.ident is not None
    place = stack.place_of(thread.ident)
    done.set()
    thread.join()
    assert place == stack.Place(words=place.words)  # waits for no other rank
    assert place.words in [f"evaluation, forward, in forward (gptlite/model/trunk.py:{line})" for line in (2, 3)]
    assert stack.place_of(0) == stack.Place(words="ended")  # no such thread


# Copies of parameters.


def replicas(layout: dict[str, int], flip: tuple[int, str] | None) -> str:
    """Builds parameters, flips one bit of one on one rank, and compares."""
    mesh = build_mesh(ParallelismConfig(**layout))  # type: ignore[arg-type]
    torch.manual_seed(0)
    named = [("norm.weight", nn.Parameter(torch.randn(64))), ("linear.weight", nn.Parameter(torch.randn(64, 64)))]
    axis = tensor_axis(mesh, sequence=False, overlap=False)
    if axis is not None:
        named[1] = ("linear.weight", cut(named[1][1], axis, 0))
    if mesh.coordinate("pp") in (0, mesh.size("pp") - 1):
        named.append(("embedding.weight", nn.Parameter(torch.randn(10, 4))))
    if flip is not None and mesh.rank == flip[0]:
        tensor = dict(named)[flip[1]]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
        local.detach().view(torch.int32).flatten()[3] ^= 1
    try:
        check_replicas(named, ["embedding.weight"], mesh, 200)
    except ReplicasDiffer as error:
        return str(error)
    return ""


def test_a_flipped_bit_is_named(two: Ranks) -> None:
    def run(flip: tuple[int, str] | None, **layout: int) -> str:
        results = two.run(f"{THIS}:replicas", layout, flip)
        assert len(set(results)) == 1
        return results[0]

    for layout in ({"tensor": 2}, {"pipeline": 2}, {}):
        assert run(None, **layout) == ""
    end = "ranks 0 and 1 (world ranks 0 and 1) after step 200"
    assert run((1, "norm.weight"), tensor=2) == f"parameter norm.weight differs between tp {end}"
    assert run((1, "linear.weight"), tensor=2) == ""  # each rank has a part of its own
    assert run((0, "linear.weight")) == f"parameter linear.weight differs between dp_replicate {end}"
    assert run((1, "embedding.weight"), pipeline=2) == f"parameter embedding.weight differs between pp {end}"
    assert run((1, "norm.weight"), pipeline=2) == ""  # another stage's


@pytest.mark.slow
def test_the_line_of_ranks_is_named() -> None:
    with Ranks(8) as ranks:
        (message,) = set(ranks.run(f"{THIS}:replicas", {"tensor": 2}, (5, "linear.weight")))
        assert message == (
            "parameter linear.weight differs between dp_replicate ranks 0, 1, 3 and 2 (world ranks 1, 3, 7 and 5) "
            "after step 200"
        )


def train_with_a_flip(overrides: list[str]) -> int:
    """Trains; before the check after step 4 rank 1 flips a bit."""

    def check(parameters, tied: list[str], mesh: Mesh, step: int) -> None:
        named = list(parameters)
        if step == 4 and mesh.rank == 1:
            dict(named)["layers.1.attn_norm.weight"].detach().view(torch.int32)[0] ^= 1
        check_replicas(named, tied, mesh, step)

    loop.check_replicas = check
    try:
        return pretrain(load(overrides))
    finally:
        loop.check_replicas = check_replicas


def test_a_run_whose_replicas_differ_ends_unsaved(two: Ranks, tiny: list[str], tmp_path: Path) -> None:
    options = ["parallelism.tensor=2", "trainer.replica_check_interval=2", "checkpoint.interval=3"]
    results = two.run(f"{THIS}:train_with_a_flip", [*tiny, *options, f"run.dir={tmp_path / 'a'}"], timeout=150)
    assert results == [1, 1]
    error = "parameter layers.1.attn_norm.weight differs between tp ranks 0 and 1 (world ranks 0 and 1) after step 4"
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"] == f"failed: {error}"
    assert f"error: {error}. Nothing was saved" in (tmp_path / "a" / "train.log").read_text()
    assert [path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*")] == ["step-00000003"]
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["comm_seconds_tp"] <= row["step_seconds"] for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 511, 512, 4096, 5000])
def test_any_bit_changes_the_fingerprint(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randn(length + 1).to(dtype)[1:]  # not at an even address
    whole = fingerprint(tensor)
    assert torch.equal(whole, fingerprint(tensor.clone()))
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in (0, length // 2, length - 1):
        if length:
            for bit in (0, 7, 8 * bits.element_size() - 1):
                flip = torch.tensor(-1).bitwise_left_shift(bit) ^ torch.tensor(-1).bitwise_left_shift(bit + 1)
                bits[place] ^= flip.to(bits.dtype)
                assert not torch.equal(whole, fingerprint(tensor))
                bits[place] ^= flip.to(bits.dtype)


# Communication time.


def lag(axis: str) -> dict:
    """Steps in which rank 1 sleeps before it communicates along an axis."""
    mesh = build_mesh(ParallelismConfig(tensor=2) if axis == "tp" else ParallelismConfig())
    watch = Watch(mesh, 60.0)
    tensor = tensor_axis(mesh, sequence=False, overlap=False)
    for number in range(12):
        with watch.step(number + 1):
            if mesh.rank == 1:
                time.sleep(0.15)
            leave(torch.ones(1, 2, 4), tensor) if tensor else all_reduce(torch.ones(4), mesh)
        time.sleep(0.02)  # no part of a step
    row = watch.communication(2.0)
    watch.close()
    return row


def test_a_sleeping_rank_is_the_slowest(two: Ranks) -> None:
    row, other = two.run(f"{THIS}:lag", "tp")
    assert row == other
    assert row["slowest_rank"] == row["slowest_rank_tp"] == 1
    assert 0.5 < row["comm_seconds_tp"] < 1.7  # of 2 seconds; one of two ranks waits nearly all the time
    assert row["comm_seconds_world"] < 0.3
    assert "comm_seconds_pp" not in row


def test_the_summary_of_a_layout():
    shares = torch.zeros(4, len(KINDS))
    shares[:, KINDS.index("tp")] = torch.tensor([0.2, 0.2, 0.3, 0.0])
    shares[:, KINDS.index("pp")] = torch.tensor([0.4, 0.4, 0.0, 0.0])
    row = summary(shares, FOUR, 10.0)
    assert row["slowest_rank"] == 3
    assert row["slowest_rank_pp"] == 1  # the second stage
    assert row["slowest_rank_tp"] is None  # 0.55 and 0.7, too close to their mean
    assert row["comm_seconds_tp"] == pytest.approx(1.75)
    assert row["comm_seconds_pp"] == pytest.approx(2.0)
    assert set(row) == {
        *(f"comm_seconds_{kind}" for kind in ("tp", "pp", "world")),
        *(f"slowest_rank{kind}" for kind in ("", "_tp", "_pp")),
    }


def test_one_device_has_no_communication():
    watch = Watch(Mesh(torch.device("cpu")), 10.0)
    with watch.step(1):
        pass
    assert watch.communication(1.0) == {}
    watch.close()


def test_shares_of_recorded_collectives():
    def entry(start: float, milliseconds: float | None, group: str) -> dict:
        return {"time_created_ns": start * 1e9, "duration_ms": milliseconds, "process_group": ["0", group]}

    entries = [
        entry(90.0, 500.0, "mesh_tp"),  # before
        entry(102.0, 400.0, "mesh_tp"),
        entry(103.0, 200.0, "mesh_dp_shard"),
        entry(104.0, 200.0, "mesh_dp_replicate"),
        entry(105.0, 800.0, "default_pg"),
        entry(106.0, None, "mesh_pp"),  # under way
    ]
    assert shares_of(entries, 100.0, 110.0) == pytest.approx({"tp": 0.05, "dp": 0.05, "world": 0.1})
    assert shares_of([], 100.0, 110.0) == {}
