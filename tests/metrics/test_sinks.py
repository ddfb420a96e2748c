import importlib
import importlib.util
import math
import os
import struct
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gptlite.errors import ConfigError
from gptlite.metrics.config import LoggerConfig, TensorboardConfig, WandbConfig
from gptlite.metrics.jsonl import read_rows
from gptlite.metrics.sinks import build_sinks, check_logger, wandb_id

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(sinks, steps):
    for step in steps:
        for sink in sinks:
            sink.write({"step": step, "loss": 5.0 / step, "grad_norm": math.nan, "mfu": None})
    for sink in sinks:
        sink.close()


def test_metrics_jsonl_is_written_whatever_the_logger(tmp_path):
    run(build_sinks(LoggerConfig(), tmp_path, "name", {}), [1, 2, 3])
    sinks = build_sinks(LoggerConfig(), tmp_path, "name", {}, start_step=2)
    run(sinks, [3, 4])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert wandb_id(sinks) is None


def test_tensorboard_shows_a_resumed_run_with_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(build_sinks(TensorboardConfig(), tmp_path, "name", {}), [1, 2, 3, 4])
    run(build_sinks(TensorboardConfig(), tmp_path, "name", {}, start_step=2), [3, 4, 5])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert set(events.Tags()["scalars"]) == {"loss", "grad_norm"}


@pytest.mark.parametrize("config", [TensorboardConfig(), WandbConfig()])
def test_a_missing_package_is_refused_before_anything_is_written(config, tmp_path, monkeypatch):
    # What find_spec says of a folder named like the package: a namespace without origin.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(ConfigError, match=r"pip install (wandb|tensorboard)$"):
        build_sinks(config, tmp_path / "run", "name", {})
    assert not (tmp_path / "run").exists()


def test_a_misspelled_mode_is_refused():
    pytest.importorskip("wandb")
    with pytest.raises(ConfigError, match=r"logger\.mode=ofline is unknown; did you mean offline\?"):
        check_logger(WandbConfig(mode="ofline"))
    check_logger(WandbConfig(mode="offline"))


@pytest.mark.parametrize(
    ("name", "schema"), [("jsonl", LoggerConfig), ("tensorboard", TensorboardConfig), ("wandb", WandbConfig)]
)
def test_presets_spell_out_the_defaults_of_their_schema(name, schema):
    ConfigStore.instance().store(group="logger", name=f"{name}_schema", node=schema)
    with initialize_config_dir(os.path.join(ROOT, "conf"), version_base="1.3"):
        composed = OmegaConf.to_object(compose(overrides=[f"+logger={name}"]).logger)
    assert composed == schema()
    assert type(composed) is schema


WANDB_RUN = """
    import sys
    from pathlib import Path
    from gptlite.errors import ConfigError
    from gptlite.metrics.config import WandbConfig
    from gptlite.metrics.sinks import build_sinks, wandb_id

    run_dir, mode, id, start = Path(sys.argv[1]), sys.argv[2] or None, sys.argv[3] or None, int(sys.argv[4])
    try:
        sinks = build_sinks(WandbConfig(mode=mode), run_dir, "name", {"model": {"num_layers": 2}}, id, start,
                            log=lambda line: print("LOG", line))
    except ConfigError as error:
        sys.exit(f"REFUSED {error}")
    print("ID", wandb_id(sinks))
    for step in range(start + 1, start + 4):
        for sink in sinks:
            sink.write({"step": step, "loss": 5.0 / step, "mfu": None})
    for sink in sinks:
        sink.close()
"""


def wandb_run(tmp_path, mode, id="", start=0):
    """A run in a process of its own with an empty home, no key, no terminal and no reachable server."""
    for name in ("home", "cwd", "tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "XDG_", "NETRC"))}
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": ROOT}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WANDB_RUN), str(tmp_path / "run"), mode, id, str(start)],
        cwd=tmp_path / "cwd",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def transaction_logs(tmp_path):
    return sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(log):
    """Bytes of the records of a W&B transaction log: LevelDB's log format behind a header of 7 bytes.

    Blocks of 32 KiB hold fragments with a header of checksum (4 bytes), length (2) and
    type: 1 whole, 2 first, 3 middle, 4 last.
    """
    data, at, record = log.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def history(log):
    """The (step, loss) rows that `wandb sync` would upload from an offline run."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for data in records(log):
        record = protocol.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            assert "mfu" not in items
            rows.append((int(items["step"]), float(items["loss"])))
    return rows


def test_wandb_without_a_key_goes_offline_keeps_its_id_and_stays_in_the_run_folder(tmp_path):
    pytest.importorskip("wandb")
    first = wandb_run(tmp_path, mode="")
    assert first.returncode == 0, first.stderr
    assert (first.stdout + first.stderr).lower().count("warning") == 1
    assert "LOG warning: W&B is offline (No API key configured" in first.stdout
    assert f"wandb sync {tmp_path}/run/wandb/offline-run-" in first.stdout
    id = first.stdout.split("ID ")[1].split()[0]

    second = wandb_run(tmp_path, mode="offline", id=id, start=2)
    assert second.returncode == 0, second.stderr
    assert f"ID {id}\n" in second.stdout

    old, new = transaction_logs(tmp_path)
    assert old.name == new.name == f"run-{id}.wandb"
    assert history(old) == [(1, 5.0), (2, 2.5), (3, pytest.approx(5 / 3))]
    assert history(new) == [(3, pytest.approx(5 / 3)), (4, 1.25), (5, 1.0)]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    for outside in ("home", "cwd", "tmp"):
        assert list((tmp_path / outside).rglob("*")) == []


@pytest.mark.slow
def test_wandb_online_asked_for_without_a_key_is_refused(tmp_path):
    pytest.importorskip("wandb")
    result = wandb_run(tmp_path, mode="online")
    assert result.returncode == 1
    assert "REFUSED logger.mode=online: W&B reports: No API key configured" in result.stderr
    assert "logger.mode=offline" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_jobs_of_a_sweep_in_one_process_each_keep_their_files(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ids = set()
    for job in ("0", "1"):
        sinks = build_sinks(WandbConfig(mode="offline"), tmp_path / job, job, {}, log=lambda line: None)
        ids.add(wandb_id(sinks))
        run(sinks, [1, 2])
        assert len(list((tmp_path / job).glob("wandb/offline-run-*"))) == 1
        assert list((tmp_path / job / "wandb" / "cache").rglob("core-debug-*.log"))
    assert len(ids) == 2
    assert not (tmp_path / "home").exists()
    assert "WANDB_CACHE_DIR" not in os.environ
    assert "warn" not in capfd.readouterr().err.lower()
