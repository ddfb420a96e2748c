"""Logs, results and configurations of runs and sweeps."""

from pathlib import Path

from fuzz.mutations import json_files, json_lines, yaml_files
from fuzz.reader import Reader, reader

from gptlite.config import load
from gptlite.config.resume import saved_overrides
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.data import order_log
from gptlite.metrics import jsonl
from gptlite.satellites.plots import curves, experts
from gptlite.satellites.sweep.begin import sweep_overrides
from gptlite.satellites.sweep.compare import compare
from gptlite.satellites.sweep.folder import Record, SweepFolder
from gptlite.satellites.sweep.table import csv_text, table
from gptlite.trainer.result import Result


@reader
def data_order(folder: Path) -> Reader:
    """data_order.jsonl of a run."""
    era = {
        "start": 0,
        "sequence_length": 8,
        "sets": {"a": {"data": "h", "tokens": 99, "weight": 1.0, "epoch": 0, "position": 0}},
    }
    row = {
        "step": 0,
        "samples": 0,
        "global_batch_size": 16,
        "eras": [era],
        "batch_ramp": [4, 4, 64],
        "skipped": [[3, 9]],
    }
    spike = {"step": 3, "spike_step": 5, "skipped": [3, 9]}
    path = folder / order_log.FILE_NAME

    def read(content: bytes) -> None:
        path.write_bytes(content)
        order_log.note_order(folder, order_log.OrderRow(9, 144, 16, [era]))
        order_log.note_spike(folder, 3, 5, (3, 9))
        path.write_bytes(content)
        rows = order_log.read_order(folder)
        for found in rows:
            found.first_sample(found.step + 3)
            found.follows(rows[-1])
        order_log.row_of_step(rows, 7)

    return Reader(json_lines([row, spike, row | {"step": 5, "batch_ramp": None, "samples": 80}]), read)


@reader
def metrics(folder: Path) -> Reader:
    """metrics.jsonl of a run: resume and curves."""
    row = {
        **{"time": "2026-11-28T00:00:00Z", "step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens": 128},
        **{"tokens_per_second": 100.0, "val_loss": 2.0, "val_bits_per_byte": 1.0, "train_accuracy": 0.5, "epoch": 0.1},
        "expert_loads": [[1.0, 2.0], [2.0, 1.0]],
    }
    path = folder / "metrics.jsonl"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        rows = jsonl.read_rows(path)
        for key in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second"):
            if values := curves._series(rows, key)[1]:
                curves.smooth(values, 2.0)
        curves.own_metrics(rows)
        if curves._series(rows, "loss")[0]:
            curves._summary(rows, "token")
        experts._chosen(rows, 3)
        jsonl.truncate_after(path, 1)

    return Reader(json_lines([row, row | {"step": 2}, {"step": 2, "spike_step": 2, "skipped": [1, 2]}]), read)


RESULT = {
    **{
        "status": "done",
        "step": 3,
        "tokens": 128,
        "unit": "tokens",
        "best_val_loss": 2.0,
        "val_loss": 2.0,
        "loss": 2.1,
    },
    **{"val_bits_per_byte": None, "tokens_per_second": 10.0, "step_seconds": 0.1, "mfu": None, "world_size": 2},
    **{"layout": "tp2", "wall_seconds": 3.0, "checkpoint": "/x/checkpoints/step-00000003", "memory_peak_bytes": 10},
    "memory_ranks": [{"peak": 10, "average": 5.0, "utilization": 0.5, "parameters": 3, "gradients": 3}],
    "comm_seconds": {"tensor": 0.01},
    "pipeline": {
        **{"ranks": 2, "schedule": "1f1b", "stages_per_rank": 1, "micro_batches": 2, "layers": [1, 1]},
        **{"stage_flops": [1.0, 2.0], "activation_checkpointing": "none"},
    },
}


@reader
def result(folder: Path) -> Reader:
    """result.json of a run, as launch returns it and a sweep compares it."""

    def read(content: bytes) -> None:
        (folder / "result.json").write_bytes(content)
        found = Result.read(folder, 0)
        str(found)
        record = Record(0, "lr=1", ["lr=1"], "ok", result=dict(found.metrics))  # type: ignore[arg-type]
        table(compare([record], 1), final=True)

    return Reader(json_files(RESULT), read)


@reader
def sweep_record(folder: Path) -> Reader:
    """A cell's record: report of the sweep."""
    record = {
        **{
            "number": 0,
            "name": "lr=1",
            "overrides": ["optimizer.lr=1"],
            "status": "ok",
            "reason": "",
            "run_dir": "x/0",
        },
        **{"exit_code": 0, "world_size": 2, "layout": "tp2", "wall_seconds": 3.0, "digest": "0" * 16, "result": RESULT},
        "predicted": {"step_seconds": 0.2, "memory": {"parameters": 3, "gradients": 3}, "assumed": ""},
    }
    sweep = SweepFolder(folder)
    (folder / "records").mkdir()
    sweep.keep(Record(1, "lr=2", ["optimizer.lr=2"], "failed", "no disk", result={}))

    def read(content: bytes) -> None:
        (folder / "records" / "0.json").write_bytes(content)
        with sweep.updating({"overrides": [], "swept": ["optimizer.lr"], "cells": 2}) as records:
            found = compare(records, 2)
            table(found, final=True)
            csv_text(found)

    return Reader(json_files(record), read)


@reader
def sweep_file(folder: Path) -> Reader:
    """sweep.json: the overrides of a sweep that goes on."""
    header = {
        **{
            "name": "s",
            "overrides": ["optimizer.lr=1,2"],
            "hydra": ["hydra/launcher=basic"],
            "swept": ["optimizer.lr"],
        },
        **{"cells": 2, "launcher": "basic", "started": "2026"},
    }

    def read(content: bytes) -> None:
        (folder / "sweep.json").write_bytes(content)
        sweep_overrides([f"hydra.sweep.dir={folder}"])

    return Reader(json_files({"version": 1, "sweep": header, "cells": []}), read)


@reader
def saved_configuration(folder: Path) -> Reader:
    """config.yaml of a run, to resume, evaluate or compare it."""
    config = load(["run.name=x", f"run.dir={folder}", "optimizer.lr=1e-3"])
    config.run.overrides = ["optimizer.lr=1e-3", "model=gpt-lite"]
    import yaml

    def read(content: bytes) -> None:
        (folder / "config.yaml").write_bytes(content)
        saved_overrides([f"run.dir={folder}"])
        to_yaml(from_yaml(content.decode()))

    return Reader(yaml_files(yaml.safe_load(to_yaml(config))), read)
