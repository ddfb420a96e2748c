"""The command: its files, exit codes, what it does again, and an hour of it."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptlite.errors import ConfigError
from gptlite.satellites.certify.fuzz import command
from gptlite.satellites.certify.fuzz.axes import Draw
from gptlite.satellites.certify.fuzz.draw import first_draws
from gptlite.satellites.certify.fuzz.layouts import COLUMNS
from gptlite.satellites.certify.fuzz.oracle import Judgement

ERRORS = {"loss": 1e-7, "grad_norm": 2e-7, "gradient": (3e-6, "head.weight"), "value": (0.01, "head.weight")}
OK = Judgement("ok", "same", ERRORS)


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Runs the command with a judge in the place of ranks; gives its exit code, its output and the draws judged."""

    def run(
        judge: Callable[[Draw], Judgement], *arguments: str, resumed: Callable[[Draw], Judgement] = lambda _: OK
    ) -> tuple[int, str, list[Draw]]:
        judged: list[Draw] = []

        def record(draw: Draw, quick: bool = False) -> Judgement:
            judged.append(draw)
            return judge(draw)

        oracle = SimpleNamespace(judge=record, judge_resumed=resumed, close=lambda: None)
        monkeypatch.setattr(command, "Oracle", lambda *_: oracle)
        code = command.run([f"output={tmp_path}", "seed=3", *arguments])
        return code, capsys.readouterr().out, judged

    return run


def rows(folder: Path) -> list[list[str]]:
    with open(folder / "layouts.csv", newline="") as file:
        return list(csv.reader(file))


def test_rows_are_written_and_those_that_agreed_are_not_run_again(fuzz: Callable, tmp_path: Path):
    code, out, judged = fuzz(lambda draw: OK, "count=6")
    assert code == 0
    assert judged == first_draws(3, 6)
    header, *found = rows(tmp_path)
    assert tuple(header) == COLUMNS
    assert [row[1:] for row in found] == [["1e-07", "2e-07", "3e-06", "head.weight", "1e-02", "head.weight", "ok"]] * 6
    assert "6 configurations (6 ok), 0 failures" in out
    assert "pairs of values: " in out
    code, out, judged = fuzz(lambda draw: OK, "count=8")
    assert judged == first_draws(3, 8)[6:]
    assert len(rows(tmp_path)) == 9
    assert "8 configurations (2 ok, 6 ok before), 0 failures" in out


def test_a_failure_is_minimised_to_a_command_and_others_like_it_are_counted(fuzz: Callable, tmp_path: Path):
    def judge(draw: Draw) -> Judgement:
        return Judgement("crash", "RuntimeError: of ZeRO") if draw["zero"] else OK

    code, out, _ = fuzz(judge, "count=12")
    assert code == 1
    assert len([each for each in tmp_path.iterdir() if each.name.startswith("failure")]) <= 3  # one for each stage
    lines = (tmp_path / "failure-1.txt").read_text().splitlines()
    assert lines[0].startswith("gptlite parity steps=2 data=synthetic ")
    shown = {each for each in lines[0].split() if each.startswith("parallelism.")}
    assert len(shown) == 2 or (len(shown) == 3 and "parallelism.context=2" in shown)
    assert lines[1:3] == ["crash: RuntimeError: of ZeRO", "seed: 3"]
    assert f"failure-1: {lines[0]}" in out
    failing = [row for row in rows(tmp_path) if row[-1] == "RuntimeError: of ZeRO"]
    assert failing
    assert all(row[1:7] == [""] * 6 for row in failing)


def test_a_difference_with_one_seed_alone_is_chance(fuzz: Callable, tmp_path: Path):
    chance = [draw for draw in first_draws(3, 8) if not draw["seed"]]
    code, out, judged = fuzz(
        lambda draw: OK if draw["seed"] else Judgement("parity", "different", ERRORS), "count=8", "resume=0"
    )
    assert code == 0
    assert len(judged) == 8 + len(chance)
    assert f"chance: {len(chance)} configurations beyond" in out
    assert all(row[0].endswith("-seed_5") and row[-1] == "ok" for row in rows(tmp_path)[1:])


def test_a_wrong_refusal_is_a_failure(fuzz: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def complain(values: list[str]) -> str:
        return "no fix: parallelism.sequence=true is refused" if "parallelism.sequence=true" in values else ""

    monkeypatch.setattr(command, "complaint", complain)
    code, *_ = fuzz(lambda draw: OK, "count=30")
    assert code == 1
    lines = (tmp_path / "failure-1.txt").read_text().splitlines()
    assert "parallelism.sequence=true" in lines[0]
    assert lines[1] == "refusal: no fix: parallelism.sequence=true is refused"


def test_some_draws_are_resumed_and_a_failure_names_the_command_that_does_so(fuzz: Callable, tmp_path: Path):
    def resumed(draw: Draw) -> Judgement:
        return Judgement("resume", "saved on 2, resumed on 1 ranks: different")

    code, out, judged = fuzz(lambda draw: OK, "count=3", "resume=2", resumed=resumed)
    assert code == 1
    assert judged == first_draws(3, 3)
    assert "1 configuration resumed" in out
    lines = (tmp_path / "failure-1.txt").read_text().splitlines()
    assert lines[0].startswith("gptlite certify data=synthetic ")
    assert fuzz(lambda draw: OK, "count=9", "resume=0", resumed=resumed)[0] == 0


def test_ctrl_c_prints_the_summary(fuzz: Callable, capsys: pytest.CaptureFixture[str]):
    calls = []

    def judge(draw: Draw) -> Judgement:
        calls.append(draw)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return OK

    with pytest.raises(KeyboardInterrupt):
        fuzz(judge)
    assert "2 configurations (2 ok), 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument", ["minutes=0", "timeout=-1", "count=-2", "seed=-1", "ranks=1", "ranks=9", "hours=2"]
)
def test_arguments_out_of_range_are_refused(argument: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        command.run([f"output={tmp_path}", argument])


@pytest.mark.slow
def test_a_minute_of_it_finds_nothing(tmp_path: Path):
    assert command.run([f"output={tmp_path}", "minutes=1", "seed=3"]) == 0
    assert len(rows(tmp_path)) > 5


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(11, 23))
def test_an_hour_of_it_finds_nothing(tmp_path: Path, seed: int):
    """In pieces of five minutes, so that CI can sample them."""
    assert command.run([f"output={tmp_path}", "minutes=5", f"seed={seed}"]) == 0
    assert len(rows(tmp_path)) > 20
