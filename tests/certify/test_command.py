"""`gptlite certify` as a user calls it: refusals, wrong collectives, and whole certificates."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from gptlite.commands.certify import configured, main, world_of
from gptlite.config import load
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec
from gptlite.satellites.certify.certificate import read
from gptlite.satellites.certify.equal import check_parity
from gptlite.satellites.certify.reduction import reduce
from gptlite.satellites.certify.resume import check_resume
from gptlite.start.pretrain import covered

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SYNTHETIC = "data=synthetic data.global_batch_size=16 ops=reference precision=fp32"
GPT = f"model=gpt-lite {SYNTHETIC}"


@dataclass
class WholeConfig(ModelConfig):
    peak_lr: float = 0.1
    features: int = 8


class WholeSpec(ModelSpec):
    """A model without blocks."""

    name, schema, reads = "whole", WholeConfig, "tokens"

    def build(self, config, ops, seed):
        return nn.Embedding(64, config.features)


register_model(WholeSpec())


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable:
    """Calls the command in this process and in a folder: its exit code, standard output and standard error."""

    def called(*words: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["certify", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return called


REFUSED = [
    (GPT, "the layout has only one rank"),
    (f"{GPT} parallelism=auto", "certify the one that `gptlite plan` prints"),
    (f"{GPT} parallelism=tp2 model.num_heads=3 model.d_model=48", "model.num_heads=3 is not divisible by"),
    (f"{GPT} parallelism=tp2 stepps=1", "stepps"),
    (f"{GPT} parallelism.tensor=2 parallelism.data=3", "has no integer solution for accumulation"),
    (f"{GPT} parallelism.tensor=2 parallelism.data=4 cluster.nodes=2", "= 16 ranks, but the layout has 8"),
    (f"{GPT} parallelism.tensor=3 cluster.nodes=1 model.num_heads=6 model.d_model=96", "world size 8 = "),
    (
        f"model=whole {SYNTHETIC} data.sequence_length=16 parallelism=pp2",
        "the whole model does not declare its number of blocks",
    ),
    (f"model=whole {SYNTHETIC} data.sequence_length=16 parallelism=tp2", "the whole model has no sharding plan"),
    (
        f"model=whole model.features=1000000 {SYNTHETIC} data.sequence_length=16 parallelism.data=2",
        "64,000,000 parameters",
    ),
    ("check", "check is neither verify, nor fuzz, nor KEY=VALUE"),
    ("verify", "certify verify takes the path of a certificate"),
    ("verify nowhere", "nowhere: No such file or directory"),
    (f"{GPT} parallelism=tp2 out=file/certificate", "out=file/certificate: file is a file"),
    (f"{GPT} parallelism=tp2 RANK", "without torchrun"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_it_refuses_in_one_line(
    command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
):
    (tmp_path / "file").touch()
    if words.endswith("RANK"):
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in rank.items():
            monkeypatch.setenv(name, value)
    code, output, errors = command(*words.removesuffix(" RANK").split())
    assert (code, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert said in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "certificates").exists()


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ("parallelism.tensor=4 parallelism.data=16", 64),
        ("parallelism.tensor=4 cluster.nodes=32", 256),
        ("parallelism.tensor=4 cluster=dgx-2-v100 cluster.nodes=2", 32),
        ("parallelism=zero3", 2),
    ],
)
def test_the_number_of_ranks_is_that_of_the_layout_or_of_the_cluster(keys: str, ranks: int):
    assert world_of(configured([*GPT.split(), "data.global_batch_size=256", *keys.split()])) == ranks


WRONG = [
    ("backward", "tensor=2", "layer: 2.down, the last whose gradient differs", "axis: tensor, the only one"),
    ("forward", "tensor=2 parallelism.pipeline=2", "layer: 2, the first whose output", "axis: tensor, since parity"),
    ("data", "pipeline=2 parallelism.zero=1 parallelism.data=2", "layer: 2, the first whose", "axis: data, since"),
    ("", "tensor=2", "", ""),
]


@pytest.mark.parametrize(
    ("fault", "layout", "layer", "axis"),
    [WRONG[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in WRONG[1:])],
)
def test_a_wrong_collective_is_named_by_layer_and_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, layout: str, layer: str, axis: str
):
    shutil.copy(HERE / "wrong_collective.py", tmp_path / "own_plugin.py")
    monkeypatch.chdir(tmp_path)
    keys = f"plugins=[own_plugin] model=own data=classes model.fault={fault} parallelism.data=1 parallelism.{layout}"
    config = load(keys.split())
    layout_ = config.parallelism
    runs = reduce(config, layout_.tensor * layout_.pipeline * (layout_.data or 1))
    row = check_parity(runs, tmp_path, lambda: None)
    assert row.passed == (not fault), row
    if fault:
        _, first, second = row.details
        assert (first.startswith(layer), second.startswith(axis)) == (True, True), row.details


MODELS = {
    "GPT": f"{GPT} parallelism.tensor=4 parallelism.pipeline=4 parallelism.zero=2 parallelism.data=16 "
    "data.global_batch_size=256",
    "experts": f"model=moe-lite {SYNTHETIC} parallelism.tensor=2 parallelism.pipeline=2 parallelism.expert=4 "
    "parallelism.data=8 parallelism.zero=3",
    "resnet": "plugins=[examples.resnet] model=resnet18 model.norm=group data=fake_images data.global_batch_size=32 "
    "parallelism.data=8 parallelism.zero=3",
    "hugging face": f"plugins=[examples.hf_causal_lm] model=hf {SYNTHETIC} data.sequence_length=64 parallelism.zero=3 "
    "parallelism.data=4 model.settings={hidden_size:64,num_attention_heads:4,intermediate_size:128}",
    "template": "plugins=[gptlite.template] model=template data=template parallelism.pipeline=2 parallelism.data=4 "
    "parallelism.zero=1",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_certified(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str):
    monkeypatch.syspath_prepend(ROOT)
    code, output, errors = command(*MODELS[model].split(), "out=made")
    assert code == 0, output + errors
    made = read(tmp_path / "made")
    assert made.passed
    results = {row["stage"]: row["passed"] for row in made.rows}
    assert list(results) == ["types", "parity", "resume", "state"]
    assert (results["parity"], results["resume"], results["state"]) == (True, True, True)
    page = (tmp_path / "made" / "certificate.html").read_text()
    assert "Certified" in page
    assert "killed before step" in page


@pytest.mark.slow
def test_a_run_tells_which_certificate_covers_it(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = [*GPT.split(), "parallelism=tp2"]
    assert command(*words)[0] == 0
    config = load(words)

    def line(**layout: object) -> str:
        changed = replace(config, parallelism=replace(config.parallelism, **layout))
        return covered(SimpleNamespace(config=changed, mesh=SimpleNamespace(world_size=2)))  # type: ignore[arg-type]

    assert line().startswith("certificate: certificates/gpt-lite-tp2/certificate.json covers this run")
    assert "it is for parallelism.sequence=False, this run has True" in line(sequence=True)
    monkeypatch.chdir(HERE)
    assert line() == ""


@pytest.mark.slow
def test_state_outside_of_the_checkpoint_is_found_by_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(HERE / "wrong_collective.py", tmp_path / "counting_plugin.py")
    text = (tmp_path / "counting_plugin.py").read_text()
    (tmp_path / "counting_plugin.py").write_text(text.replace('"own"', '"counting"').replace('"classes"', '"counted"'))
    monkeypatch.chdir(tmp_path)
    keys = "plugins=[counting_plugin] model=counting data=counted model.fault=counter parallelism=tp2"
    runs = reduce(load(keys.split()), 2)
    assert check_parity(runs, tmp_path, lambda: None).passed
    row = check_resume(runs, tmp_path, 1, lambda: None).row
    assert not row.passed
    assert row.words.startswith("after two kills on the same layout, ")
    assert "tensors differ from those of a run that nothing stopped: " in row.words
