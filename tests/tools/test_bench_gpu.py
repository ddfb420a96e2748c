"""tools/bench_gpu.py where there is no GPU: refusals, the report, and each part on a CPU with small shapes."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError

ROOT = CONF_DIR.parent
PROGRAM = ROOT / "tools" / "bench_gpu.py"
PICTURE_WIDTH = 900


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prat=model"], "did you mean part?"),
        (["part=model", "wheels=nowhere"], "wheels=nowhere is not a folder"),
    ],
)
def test_wrong_inputs_are_refused_in_a_line(arguments: list[str], named: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"part": "modle"}, "did you mean model?"),
        ({"part": "peer"}, "part=peer needs peer=NANOGPT"),
        ({"part": "peer", "peer": "nowhere"}, "peer=nowhere has no model.py"),
        ({"part": "model", "tree": "nowhere"}, "tree=nowhere is not a source tree"),
        ({"part": "model", "minutes": 0.0}, "minutes=0 must be above 0"),
        ({"part": "model", "device": "tpu"}, "device=tpu is neither cuda nor cpu"),
        ({"part": "model", "size": "huge"}, "size=huge is neither full nor tiny"),
        ({"part": "steps", "device": "cpu"}, "add size=tiny"),
        *(({"part": part}, "finds no GPU") for part in ("gates", "ceilings", "kernels", "profile", "steps")),
        ({}, "part=all: torch"),
    ],
)
def test_what_cannot_run_is_named(given: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from bench_gpu import Arguments
    from gpu_bench.parts import check

    with pytest.raises(ConfigError, match=re.escape(named)):
        check(Arguments(**given))


@pytest.mark.slow
def test_all_parts_run_on_a_cpu_into_one_report(tmp_path: Path) -> None:
    peer = tmp_path / "peer"
    peer.mkdir()
    (peer / "model.py").write_text(PEER)
    (tests := tmp_path / "in a folder" / "test_of_one.py").parent.mkdir()
    tests.write_text("def test_one() -> None:\n    assert True\n")
    words = f"tests={shlex.quote(str(tests))}"
    done = call("device=cpu", "size=tiny", f"output={tmp_path / 'out'}", words, f"peer={peer}")
    report = (tmp_path / "out" / "report.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No failures." in report
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(data) == ["gates", "ceilings", "kernels", "steps", "profile", "peer", "model"]
    assert data["gates"][f"pytest {tests}"]["exit_code"] == 0
    assert [row["verdict"] for row in data["gates"]["gradients"]] == ["reference", *["fine"] * 6]
    assert data["steps"]["tiny, bf16, micro-batch 2, eager"]["tokens_per_second"] > 0
    assert data["steps"]["tiny, bf16, micro-batch 2, eager"]["predicted"]["seconds"] > 0
    assert data["profile"]["classes"]["GEMM block"]["ns_a_token"] > 0
    assert {"tiny, nanoGPT", "tiny, gptlite"} <= set(data["peer"])
    for name in ("profile.png", "model-tiny.png"):
        assert f"({name})" in report
        header = (tmp_path / "out" / name).read_bytes()[16:20]
        assert int.from_bytes(header, "big") == PICTURE_WIDTH


@pytest.mark.slow
def test_contenders_run_on_a_cpu_and_what_needs_a_gpu_is_named(tmp_path: Path) -> None:
    done = call("part=graph", "device=cpu", "size=tiny", f"output={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "out" / "graph.json").read_text())["results"]
    assert row["lowest"] <= row["seconds"] <= row["highest"]
    assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["seconds"])
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Not measured: graph, tiny: " in report
    assert "(graph.png)" in report


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_exit_code_is_1(tmp_path: Path, script: Callable) -> None:
    bad = tmp_path / "test_bad.py"
    bad.write_text("def test_bad():\n    assert 1 == 2, 'planted'\n")
    done = script("bench_gpu", "part=gates", "device=cpu", f"output={tmp_path / 'out'}", f"tests={bad}")
    assert done.code == 1, done.err
    (failure,) = json.loads((tmp_path / "out" / "gates.json").read_text())["failures"]
    assert failure.startswith(f"pytest {bad}: exit code 1")
    assert "planted" in (tmp_path / "out" / "report.md").read_text()


# As much of nanoGPT's model as a step needs.
PEER = """
from dataclasses import dataclass
import torch
from torch import nn


@dataclass
class GPTConfig:
    block_size: int = 0
    vocab_size: int = 0
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    dropout: float = 0.0
    bias: bool = False


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
