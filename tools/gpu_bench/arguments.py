"""Arguments of `tools/bench_gpu.py`."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Arguments:
    """Command-line arguments."""

    part: str = "all"
    device: str = "cuda"
    size: str = "full"
    minutes: float = 8.0
    output: str | None = None
    peer: str | None = None
    tree: str | None = None
    tests: str = "tests/gpu"
    wheels: str = str(ROOT / "wheels")
