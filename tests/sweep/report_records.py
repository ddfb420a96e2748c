"""Records of sweeps as they come: cells that ran, with realistic figures, and cells that did not."""

from typing import Any

from gptlite.satellites.sweep.folder import FAILED, OK, OUT_OF_MEMORY, PRUNED, Record

MIB = 2**20


def pipeline(schedule: str = "1f1b", ranks: int = 2, stages: int = 1, micro_batches: int = 8) -> dict[str, Any]:
    """result.json's `pipeline`, of equal stages."""
    return {
        "ranks": ranks,
        "schedule": schedule,
        "stages_per_rank": stages,
        "micro_batches": micro_batches,
        "layers": [1] * ranks * stages,
        "stage_flops": [600] * ranks * stages,
        "activation_checkpointing": "none",
    }


def result(**changes: Any) -> dict[str, Any]:
    """A result.json of a run on two ranks."""
    ranks = [
        {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB, "activations": (9 - rank) * MIB,
         "peak": (300 + rank) * MIB, "average": (200 + rank) * MIB, "utilization": 0.75 + 0.25 * rank}
        for rank in range(2)
    ]  # fmt: skip
    return {
        "status": "done",
        "step": 20,
        "loss": 5.25,
        "tokens_per_second": 4000.0,
        "step_seconds": 0.1,
        "mfu": None,
        "comm_seconds": {"dp": 0.02, "world": 0.01},
        "memory_ranks": ranks,
        "memory_peak_bytes": 300 * MIB,
        "world_size": 2,
        "layout": "data 2 (zero 0)",
        "pipeline": None,
        "wall_seconds": 11.0,
    } | changes


def predicted(step_seconds: float = 0.11, activations: int = 11 * MIB) -> dict[str, Any]:
    """What the plan said of it."""
    memory = {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB, "activations": activations}
    return {"step_seconds": step_seconds, "tokens_per_second": 1.0, "mfu": None, "memory": memory, "memory_rank": 0}


def record(number: int, name: str, **changes: Any) -> Record:
    """A cell that ran on two ranks; what is given of `result` is changed in it."""
    found = changes.pop("result", {})
    values: dict[str, Any] = {
        "number": number,
        "name": name,
        "overrides": [f"parallelism={name}"],
        "status": OK,
        "run_dir": f"{number}-{name}",
        "exit_code": 0,
        "world_size": 2,
        "layout": "data 2 (zero 0)",
        "wall_seconds": 12.0,
        "result": result(**found),
    }
    return Record(**values | changes)


def sweep() -> list[Record]:
    """Six cells: the second is the fastest, three did not run to their end."""
    return [
        record(0, "single", world_size=1, layout="one rank",
               result={"comm_seconds": {}, "world_size": 1, "tokens_per_second": 2500.0, "mfu": 0.312, "loss": 5.0}),
        record(1, "ddp", predicted=predicted(), result={"loss": 5.0000002}),
        record(2, "pp2", layout="pipeline 2, 1f1b",
               result={"comm_seconds": {"pp": 0.04, "world": 0.01}, "pipeline": pipeline(),
                       "tokens_per_second": 3000.0}),
        Record(3, "zero3", ["parallelism=zero3"], OUT_OF_MEMORY, "rank 1: cannot allocate 134217728 bytes",
               "3-zero3", 1),
        Record(4, "tp3", ["parallelism.tensor=3"], PRUNED, "model.num_heads=4 is not divisible by 3", "4-tp3"),
        Record(5, "tp2", ["parallelism=tp2"], FAILED, "RuntimeError: rank 1 <has> crashed & burned", "5-tp2", 1, 2),
    ]  # fmt: skip
