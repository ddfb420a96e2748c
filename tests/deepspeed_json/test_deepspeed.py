"""DeepSpeed JSONs as configurations: published ones, every kind of key, wrong inputs, and the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_json.deepspeed_files import ADAMW, LONG, PUBLISHED, RANKS, RUN
from run_files import read_metrics
from yaml import safe_load

from gptlite import load
from gptlite.commands.import_config import report, run
from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.satellites.deepspeed import with_deepspeed
from gptlite.satellites.deepspeed.expand import overrides_of
from gptlite.satellites.deepspeed.file import read
from gptlite.satellites.deepspeed.keys import NO_EFFECT_SECTIONS, REFUSED_IF_ON, ROOT, ZERO
from gptlite.satellites.deepspeed.rows import Row, Verdict
from gptlite.satellites.deepspeed.translate import translate

HERE = Path(__file__).parent / "published"
ROOT_DIR = CONF_DIR.parent
PAGE = ROOT_DIR / "docs/deepspeed.md"


@pytest.fixture(autouse=True)
def composed_by_hydra() -> None:
    """Not here: what is judged is the overrides that a JSON becomes."""


def refused(content: dict, **known) -> list[str]:
    return [row.key for row in translate(content, **known) if row.verdict is Verdict.refused]


def overrides(content: dict, **known) -> list[str]:
    assert refused(content, **known) == []
    return overrides_of(translate(content, **known))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_runs_or_is_refused_by_its_keys(name: str):
    path, outcome = HERE / f"{name}.json", PUBLISHED[name][2]
    if outcome in (RUN, RANKS, LONG, ADAMW):
        load([f"deepspeed={path}", *outcome])
        return
    content = read(str(path))
    assert refused(content) == list(outcome)
    with pytest.raises(ConfigError) as caught:
        load([f"deepspeed={path}"])
    assert all(key in str(caught.value) for key in outcome)
    assert "\n" not in str(caught.value)


def test_the_page_lists_the_published_configurations():
    def result(outcome: tuple[str, ...]) -> str:
        if outcome == RANKS:
            return "run, with `parallelism.data=N`"
        if outcome == LONG:
            return "run, with `trainer.max_steps=N`"
        if outcome == ADAMW:
            return "run, with `optimizer=adamw`"
        return f"refused: {', '.join(f'`{key}`' for key in outcome)}" if outcome else "run"

    lines = ["| file | source | result |", "|---|---|---|"]
    for name, (repository, path, outcome) in PUBLISHED.items():
        lines.append(f"| `{name}` | {repository}: `{path}` | {result(outcome)} |")
    assert {path.stem for path in HERE.glob("*.json")} == set(PUBLISHED)
    assert "\n".join(lines) in PAGE.read_text(), "\n".join(lines)


def test_the_lines_of_the_page_translate_as_they_say():
    lines = re.findall(r"^\| (`\{.*?\}`) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) > 25
    for fragments, here in lines:
        for fragment in re.findall(r"`(\{.*?\})`", fragments):
            content = json.loads(fragment)
            rows = translate(content)
            set_by_default = [] if "precision" in here else ["precision=fp32"]
            set_by_default += [] if "clip_norm" in here else ["optimizer.clip_norm=1.0"]
            if here in ("refused", "no-op"):
                assert here in {row.verdict.value for row in rows}, fragment
            else:
                assert sorted(overrides(content)) == sorted([*here.strip("`").split(), *set_by_default]), fragment


def test_every_plain_key_has_a_verdict():
    samples = {"flag": False, "integer": 1, "count": 1, "number": 1.0, "text": "mean", "section": {}, "anything": 1}
    for rules, above in ((ROOT, ""), (ZERO, "zero_optimization.")):
        for name, (kind, _) in rules.items():
            content = {name: samples[kind.name]}
            rows = translate({"zero_optimization": {"stage": 3, **content}} if above else content)
            (row,) = [row for row in rows if row.key == f"{above}{name}"]
            assert row.reason or row.overrides
            wrong = {name: [None]}
            bad = translate({"zero_optimization": wrong} if above else wrong)
            assert kind.name == "anything" or f"{above}{name}" in [r.key for r in bad if r.verdict is Verdict.refused]
    for name in REFUSED_IF_ON:
        assert refused({name: {"enabled": True}}) == [name]
        assert refused({name: {"enabled": False}}) == []
    assert refused({name: {"enabled": True} for name in NO_EFFECT_SECTIONS}) == []


WITHOUT_SECTIONS = ["precision=fp32", "optimizer.clip_norm=1.0"]
ARITHMETIC = [
    # train, micro, accumulation, ranks -> overrides, or None if it is refused
    (32, 4, 2, None, ["data.global_batch_size=32", "data.micro_batch_size=4", "parallelism.data=4"]),
    (32, 4, 2, 4, ["data.global_batch_size=32", "data.micro_batch_size=4", "parallelism.data=4"]),
    (32, 4, 2, 8, None),
    (32, 5, 2, None, None),
    (32, 4, None, None, ["data.global_batch_size=32", "data.micro_batch_size=4"]),
    (32, 4, None, 3, None),
    (32, None, 2, None, ["data.global_batch_size=32"]),
    (32, None, 2, 4, ["data.global_batch_size=32", "data.micro_batch_size=4"]),
    (32, None, 3, 4, None),
    (None, 4, 2, None, None),
    (None, 4, 2, 3, ["data.micro_batch_size=4", "data.global_batch_size=24"]),
    (None, 4, None, 3, ["data.micro_batch_size=4", "data.global_batch_size=12"]),
    ("auto", 4, "auto", None, ["data.micro_batch_size=4"]),
    ("auto", "auto", 8, None, []),
    (None, None, 8, None, []),
]


@pytest.mark.parametrize(("train", "micro", "steps", "ranks", "expected"), ARITHMETIC)
def test_the_batch_arithmetic(train, micro, steps, ranks, expected):
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    content = {name: value for name, value in zip(names, (train, micro, steps), strict=True) if value is not None}
    if expected is None:
        assert len(refused(content, ranks=ranks)) == 1
        assert refused(content, ranks=ranks, overridden=["data.global_batch_size"]) == []
        assert (refused(content, ranks=ranks, overridden=["data.micro_batch_size"]) == []) is (train is not None)
    else:
        assert overrides(content, ranks=ranks) == [*expected, *WITHOUT_SECTIONS]


def optimized(kind: str, **params) -> list[str]:
    return overrides({"optimizer": {"type": kind, "params": params}})[: -len(WITHOUT_SECTIONS)]


def test_optimizers_are_deepspeeds_with_its_defaults():
    given = {"lr": 1, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2}
    assert optimized("Adam", **given)[0] == optimized("adamw", **given)[0] == "optimizer=adamw"
    assert optimized("Adam", adam_w_mode=False, **given)[0] == "optimizer=adam"
    assert optimized("AdamW", adam_w_mode=False, **given)[0] == "optimizer=adamw"
    assert {"optimizer.lr=0.001", "optimizer.beta2=0.999", "optimizer.weight_decay=0.0"} < set(optimized("Adam"))
    assert {"optimizer.min_trust=0.01", "optimizer.max_trust=0.3"} < set(optimized("Lamb", max_coeff=0.3))
    assert "optimizer.momentum=0.0" in optimized("SGD")
    assert {"optimizer.lr=0.02", "optimizer.adamw_lr_ratio=0.5"} < set(optimized("Muon", muon_lr=0.02, adam_lr=0.01))
    assert "optimizer.local_step_clipper=4" in optimized("ZeroOneAdam", local_step_clipper=4)
    assert {"optimizer.local_step_scaler=32678", "optimizer.local_step_clipper=16"} < set(optimized("ZeroOneAdam"))
    told = {"optimizer.scale=original", "optimizer.newton_schulz=quintic", "optimizer.eps=1e-10"}
    assert told < set(optimized("Muon", lr=0.01))
    assert optimized("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto") == ["optimizer=adamw"]
    for kind in ("Adam", "AdamW", "Lamb", "Lion", "Muon", "SGD"):
        load([*optimized(kind, lr=0.01)])


def test_a_schedule_sets_the_peak_and_the_length():
    params = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-4, "warmup_num_steps": 1, "warmup_type": "linear"}
    rate = {"type": "AdamW", "params": {"lr": 1.0}}
    for kind, more in (("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 500})):
        content = {"optimizer": rate, "scheduler": {"type": kind, "params": {**params, **more}}}
        config = load(overrides(content))
        assert config.optimizer.lr == 1e-4
        schedule = config.schedule
        assert (schedule.warmup_steps, schedule.min_ratio, schedule.log) == (2, pytest.approx(0.1), False)
        assert schedule.decay.name == ("linear" if more else "none")
        assert config.trainer.max_steps == (500 if more else load().trainer.max_steps)


@pytest.mark.parametrize(("device", "verdict"), [("cpu", "no-op"), ("none", "no-op"), ("nvme", "taken")])
def test_a_folder_for_offload_is_read_only_for_nvme(device: str, verdict: str):
    content = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "/nvme"}}}
    rows = [row for row in translate(content) if row.key == "zero_optimization.offload_optimizer.nvme_path"]
    assert [row.verdict.value for row in rows] == [verdict]


def test_parameters_go_to_files_with_the_optimizer_state():
    nvme = {"device": "nvme", "nvme_path": "/nvme"}

    def taken(stage: int, **offload: object) -> list[str]:
        words = overrides({"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage, **offload}})
        return [word for word in words if "offload" in word]

    files = ["parallelism.offload=nvme", "parallelism.offload_path=/nvme"]
    both = taken(3, offload_optimizer=nvme, offload_param=nvme)
    assert sorted(both) == [files[0], "parallelism.offload_parameters=true", files[1]]
    assert taken(2, offload_optimizer=nvme, offload_param=nvme) == files
    assert taken(3, offload_optimizer=nvme, offload_param={"device": "cpu"}) == files
    assert sorted(taken(3, offload_param=nvme)) == sorted(both)
    assert taken(2, offload_param=nvme) == []
    assert taken(3, offload_optimizer={"device": "cpu"}, offload_param=nvme) == ["parallelism.offload=cpu"]
    sizes = {"pin_memory": True, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
    assert sorted(taken(3, offload_param=nvme | sizes)) == sorted(both)


WRONG = [
    ("{", "is not JSON: line 1, column 2"),
    ('{"a": 1,\n "b": }', "is not JSON: line 2, column 7"),
    ("[" * 100_000, "it is nested more than 64 deep"),
    ("[1]", r"it is \[1\], not an object"),
    ("", "is not JSON: line 1, column 1"),
    ('{"fp16": {}, "fp16": {}}', 'the key "fp16" is given twice'),
    ('{"gradient_clipping": NaN}', "gradient_clipping=NaN: must be a finite number"),
    ('{"gradient_clipping": 1e999}', "gradient_clipping=inf: must be a finite number"),
    ('{"gradient_cliping": 1}', "gradient_cliping=1: is not a key of DeepSpeed 0.19; did you mean gradient_clipping"),
    ('{"zero_optimization": {"stag": 1}}', "stag=1: is not a key of DeepSpeed 0.19; did you mean stage"),
    ('{"zero_optimization": {"stage": 4}}', "stage=4: is not a ZeRO stage"),
    ('{"zero_optimization": {"stage": "3"}}', 'stage="3": must be a whole number'),
    ('{"zero_optimization": 2}', "zero_optimization=2: must be an object"),
    ('{"bf16": {"enabled": "yes"}}', 'bf16.enabled="yes": must be true or false'),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16.enabled=true: fp16 is enabled too"),
    ('{"train_batch_size": 0}', "train_batch_size=0: must be a whole number of at least 1"),
    ('{"train_batch_size": 2.5}', "train_batch_size=2.5: must be a whole number"),
    ('{"optimizer": {"type": "Adm"}}', 'optimizer.type="Adm": is not one of .*did you mean adam'),
    ('{"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}', "betas=0.9: must be a pair of numbers"),
    ('{"optimizer": {"type": "Adam", "params": {"ep": 1}}}', "params.ep=1: is not a key .*did you mean eps"),
    ('{"scheduler": {"type": "WarmupLr"}}', "did you mean WarmupLR"),
    ('{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "exp"}}}', "is neither log nor linear"),
    ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', "needs nvme_path"),
    ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "needs nvme_path"),
    ('{"zero_optimization": {"offload_param": {"buffer_sise": 1}}}', "buffer_sise=1: is not a key .*buffer_size"),
    ('{"zero_optimization": {"offload_param": {"pin_memory": 1}}}', "pin_memory=1: must be true or false"),
    ('{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}', "is not one of none, cpu, nvme"),
    ('{"communication_data_type": "int8"}', "is neither fp32 nor the compute dtype, fp32"),
    ('{"elasticity": {"enabled": true}, "pld": 1}', "elasticity: .*; pld=1: "),  # all of them at once
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_input_is_one_line_that_names_file_key_and_reason(tmp_path: Path, text: str, message: str):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load([f"deepspeed={file}"])
    assert str(caught.value).startswith(f"deepspeed={file}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_and_two_files_are_refused(tmp_path: Path):
    for path, message in ((tmp_path / "no.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: {message}"):
            load([f"deepspeed={path}"])
    with pytest.raises(ConfigError, match=f"^{tmp_path} cannot be read"):
        run([str(tmp_path)])
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text, at byte 0"):
        load([f"deepspeed={tmp_path}/ds.json"])
    with pytest.raises(ConfigError, match="give one file"):
        load(["deepspeed=a.json", "deepspeed=b.json"])


TEXT = """\
{  // the "comments" and commas of a person's file
  "train_batch_size": 16, # "x": 1
  "gradient_clipping": 0.5, /* two
  lines, */
  "bf16": {"enabled": true,},
  "wandb": {"enabled": true, "project": "a // b, ]",},
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.99,]}},
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    return path


def test_comments_and_trailing_commas_are_accepted(file: Path):
    assert read(str(file))["wandb"] == {"enabled": True, "project": "a // b, ]"}
    assert load([f"deepspeed={file}"]).logger.project == "a // b, ]"


def test_the_command_line_wins_wherever_it_stands(file: Path):
    given = [f"+deepspeed={file}", "optimizer.lr=1", "parallelism.zero=1"]
    for arguments in (given, given[::-1]):
        config = load(arguments)
        assert (config.optimizer.lr, config.parallelism.zero, config.optimizer.clip_norm) == (1.0, 1, 0.5)
    config = load([f"deepspeed={file}", "optimizer=lion", "parallelism=tp2", "data=synthetic"])
    assert (config.optimizer.clip_norm, config.optimizer.lr, config.parallelism.zero) == (0.5, 1e-4, 0)
    assert config.data.global_batch_size == 16
    assert with_deepspeed(["seed=1"]) == ["seed=1"]


def test_import_config_prints_a_table_of_80_columns_and_the_command(file: Path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([str(file), "ranks=4"]) == 0
    out = capsys.readouterr().out
    *table, _, last = out.splitlines()
    assert table[0] == f"{file}: 10 taken, 0 no-op, 0 refused"
    assert max(map(len, table[1:])) <= 80
    assert "  stage=2                        taken    parallelism=zero2" in table
    words = last.partition("train.py ")[2].split()
    assert "parallelism=zero2" in words
    assert run([str(HERE / "ex-layer-drop.json")]) == 2
    assert "progressive_layer_drop           refused  every layer" in capsys.readouterr().out
    key = "x" * 32
    for name, lines in ((key, [f"{key} no-op    unused"]), (f"{key}x", [f"{key}x", f"{'':32} no-op    unused"])):
        assert report("a", [Row(name, {}, Verdict.no_op, "unused")], 80).splitlines()[2:-2] == lines
    for arguments, message in (
        ([], "takes FILE"),
        ([str(file), "ranks=0"], "ranks=0"),
        ([str(file), "x=1"], "x is no"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(arguments)


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, str(ROOT_DIR / "train.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT_DIR)


def test_the_command_composes_it_and_refuses_by_exit_code_2(file: Path):
    done = call(f"deepspeed={file}", "trainer.max_steps=20", "--cfg", "job")
    assert safe_load(done.stdout)["precision"]["dtype"] == "bf16"
    assert done.stderr == f"deepspeed: 10 of 10 keys of {file} are set; {command('import-config')} {file} lists them\n"
    done = call(f"deepspeed={HERE / 'ex-zenflow.json'}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.slow
def test_a_run_is_that_of_the_equivalent_command(tmp_path: Path):
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2}}
    content = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": warmup,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    equal = (
        "data.global_batch_size=8 data.micro_batch_size=2 parallelism=zero2 parallelism.data=2 optimizer.clip_norm=0.5 "
        "trainer.log_interval=1 precision=bf16 optimizer=adamw optimizer.beta2=0.98 optimizer.weight_decay=0.1 "
        "optimizer.lr=1e-3 schedule=warmup schedule.warmup_steps=2 schedule.first_ratio=0"
    ).split()
    common = ["model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.sequence_length=32"]
    common += ["data=synthetic", "data.vocab_size=64", "data.num_tokens=4000", "trainer.max_steps=4"]
    common += ["trainer.stop_step=2", "trainer.eval_interval=0", "trainer.sample_tokens=0", "run.name=same"]
    folders = [tmp_path / "json", tmp_path / "command"]
    composed = [load([*given, *common, "run.dir=x"]) for given in ([f"deepspeed={file}"], equal)]
    for config in composed:
        config.run.overrides = []  # in another order
    assert composed[0] == composed[1]
    for folder, given in zip(folders, ([f"deepspeed={file}"], equal), strict=True):
        done = call(*given, *common, f"run.dir={folder}")
        assert done.returncode == 0, done.stderr
    ours, theirs = ([row["loss"] for row in read_metrics(folder) if "loss" in row] for folder in folders)
    assert len(ours) == 2
    assert ours == theirs
