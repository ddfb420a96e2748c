"""Certificates: sealed content, the match with a run, and the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gptlite.commands.certify import main
from gptlite.config import load
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.satellites.certify import sources
from gptlite.satellites.certify.certificate import Certificate, read
from gptlite.satellites.certify.match import certificate_words, differences
from gptlite.satellites.certify.page import page
from gptlite.satellites.certify.reduction import reduce
from gptlite.satellites.certify.rows import StageRow
from gptlite.satellites.certify.stages import sealed

LAYOUT = ("model=gpt-lite", "data=synthetic", "parallelism.tensor=4", "parallelism.data=2", "parallelism.zero=1")
ROWS = [StageRow("types", None, "pip install spmd-types"), StageRow("parity", True, "loss 1e-07", 3.0)]


@pytest.fixture(scope="module")
def config() -> Config:
    return load(LAYOUT)


@pytest.fixture(scope="module")
def made(config: Config) -> Certificate:
    return sealed(replace(config, parallelism=replace(config.parallelism, data=2)), 8, reduce(config, 8), ROWS, 3.0)


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path, made: Certificate):
    assert read(made.write(tmp_path / "new")) == made
    assert read(tmp_path / "new") == made
    assert made.passed
    assert (made.axes, made.world_size) == ({"tensor": [4, 2], "data": [2, 2]}, 8)
    assert made.versions.keys() >= {"python", "torch", "gptlite"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"passed": true', '"passed": false'), "was altered after it was written"),
        (lambda text: text.replace("gpt-lite", "gpt3-175b"), "was altered after it was written"),
        (lambda text: text[: len(text) // 2], "is not a certificate: it is not JSON"),
        (lambda text: "", "is not a certificate"),
        (lambda text: "[]", "is not a certificate"),
        (lambda text: "{}", "was altered"),
    ],
)
def test_a_certificate_edited_by_hand_is_refused_in_one_line(tmp_path: Path, made: Certificate, change, said: str):
    file = made.write(tmp_path / "a")
    file.write_text(change(file.read_text()))
    with pytest.raises(ConfigError, match=said) as refused:
        read(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)
    assert said in certificate_words(load(LAYOUT), 8, tmp_path)


def test_a_certificate_of_another_version_names_it(tmp_path: Path, made: Certificate):
    file = replace(made, schema_version=2).write(tmp_path)
    with pytest.raises(ConfigError, match="schema_version 2, but this gptlite reads 1"):
        read(file)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallelism.tensor=8"], "it is for parallelism.tensor=4, this run has 8"),
        (["parallelism.data=4"], "it is for parallelism.data=2, this run has 4"),
        (["parallelism.zero=3"], "it is for parallelism.zero=1, this run has 3"),
        (["parallelism.sequence=true"], "it is for parallelism.sequence=False, this run has True"),
        (["model.num_layers=8"], "it is for model.num_layers=4, this run has 8"),
        (["precision=bf16"], "it is for precision.dtype=auto, this run has bf16"),
        (["optimizer=muon"], "it is for optimizer=adamw, this run has muon"),
        (["optimizer.lr=1e-5", "trainer.max_steps=7", "parallelism.prefetch=2", "data.global_batch_size=64"], ""),
        (["parallelism.data=null"], ""),  # of eight ranks, the same
    ],
)
def test_a_run_matches_or_the_first_difference_is_named(made: Certificate, overrides: list[str], reason: str):
    config = load([*LAYOUT, *overrides])
    ranks = config.parallelism.tensor * (config.parallelism.data or 2)
    assert next(differences(made, config, ranks), "") == reason


def test_changed_sources_and_versions_no_longer_match(made: Certificate, config: Config):
    changed = [replace(made, **{key: "0" * 64}) for key in ("model_digest", "gptlite_digest")]
    changed += [replace(made, versions=made.versions | {"torch": "1.0"})]
    reasons = [list(differences(each, config, 8)) for each in changed]
    assert reasons[0] == ["the source of the model or of its plug-ins has changed"]
    assert reasons[1] == ["the source of gptlite has changed"]
    assert reasons[2] == [f"it is for torch 1.0, this run has {made.versions['torch']}"]
    failed = replace(made, passed=False, rows=[{"stage": "parity", "passed": False}])
    assert list(differences(failed, config, 8)) == ["its parity failed"]


def test_the_digest_of_a_model_follows_its_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = (Path(__file__).parent / "wrong_collective.py").read_text()
    source = source.replace('"own"', '"digested"').replace('"classes"', '"digested_points"')
    (tmp_path / "digested.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(["plugins=[digested]", "model=digested", "data=digested_points", "parallelism.data=2"])
    before = sources.model_digest(config)
    assert sources.model_digest(config) == before
    (tmp_path / "digested.py").write_text(source + "\n")
    assert sources.model_digest(config) != before


def test_train_names_the_certificate_that_covers_its_run(tmp_path: Path, made: Certificate, config: Config):
    assert certificate_words(config, 8, tmp_path) == ""  # no certificate
    made.write(tmp_path / "a")
    line = f"certificate: {tmp_path}/a/certificate.json covers this run ({made.created:.10}, without types)"
    assert certificate_words(config, 8, tmp_path) == line
    other = load([*LAYOUT, "parallelism.tensor=8"])
    assert certificate_words(other, 16, tmp_path) == (
        f"certificate: none of 1 certificate covers this run; {tmp_path}/a/certificate.json: "
        "it is for parallelism.tensor=4, this run has 8"
    )
    different = replace(made, config=made.config | {"model": made.config["model"] | {"num_heads": 1, "d_model": 1}})
    different.write(tmp_path / "0")
    assert f"{tmp_path}/a/" in certificate_words(other, 16, tmp_path)  # the nearest


def test_the_page_is_one_file_that_escapes_what_it_shows(made: Certificate):
    rows = [*made.rows, {"stage": "state", "passed": False, "words": "<b>&", "seconds": 1.0, "details": ["why"]}]
    text = page(replace(made, passed=False, rows=rows))
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert "Not certified" in text
    for outside in ("http:", "https:", "src=", "<script", "url("):
        assert outside not in text
    for word in ("NCCL", made.model_digest, "tensor", made.worlds[0], "not checked"):
        assert word in text


def test_verify_says_whether_a_certificate_covers_a_configuration(
    tmp_path: Path, made: Certificate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = made.write(tmp_path)

    def verified(*words: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["certify", "verify", str(file), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    said = "gpt-lite, data 2 (zero 1) x tensor 4: 8 ranks; types not checked, parity ok\n"
    assert verified() == (0, said)
    assert verified(*LAYOUT) == (0, said + "it covers this configuration\n")
    code, output = verified(*LAYOUT, "model.d_model=512")
    assert code == 1
    assert "different: it is for model.d_model=256, this run has 512" in output


def test_the_content_is_plain_json(tmp_path: Path, made: Certificate):
    content = json.loads(made.write(tmp_path).read_text())
    assert content["overrides"] == list(LAYOUT)
    assert content["rows"][0]["passed"] is None
