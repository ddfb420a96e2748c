"""`test`: comparison of every op on this machine with torch's ops in float64.

gptlite kernels test [device=cpu]

Prints a table of the largest errors, each relative to the largest value of its tensor. device: cpu or cuda. Exit
codes: 0 if all errors are within the tolerance, 1 if not, or if there are no kernels.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.errors import ConfigError
from gptlite.kernels.case import Case, Inputs
from gptlite.kernels.cases import CASES
from gptlite.kernels.library import Unavailable, load
from gptlite.kernels.tables import table

# Relative to the largest value. One rounding error is 2^-24, 2^-9 or 2^-12. Inputs of a backward op are also rounded.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
DEVICES = ("cpu", "cuda")
ROWS, WIDTH = 37, 77  # not multiples of a vector or tile size


@dataclass
class Options:
    """Command-line options."""

    device: str = "cpu"


@dataclass(frozen=True)
class Error:
    """Largest error of an op's results, relative to the largest value."""

    op: str
    dtype: torch.dtype
    value: float

    @property
    def fine(self) -> bool:
        """True if the error is within the tolerance. False for NaN."""
        return self.value <= TOLERANCES[self.dtype]


def run(options: Options) -> int:
    """Print the table and return the exit code. Raises ConfigError."""
    check_device(options.device)
    loaded = load(options.device)
    if isinstance(loaded, Unavailable):
        print(f"no kernels: {loaded.reason}")
        return 1
    device = torch.device(options.device)
    errors = [error for case in CASES if not case.cpu_only or device.type == "cpu" for error in measure(case, device)]
    names = list(dict.fromkeys(error.op for error in errors))
    rows = [("op", *(str(dtype).removeprefix("torch.") for dtype in TOLERANCES))]
    for name in names:
        rows.append((name, *(_cell([e for e in errors if e.op == name and e.dtype == dtype]) for dtype in TOLERANCES)))
    rows.append(("tolerance", *(f"{each:.1e}" for each in TOLERANCES.values())))
    print(table(rows))
    bad = [error for error in errors if not error.fine]
    print(f"{len(bad)} of {len(errors)} errors exceed the tolerance" if bad else "all within the tolerance")
    return 1 if bad else 0


def check_device(device: str) -> None:
    """Raise ConfigError for a device without kernels."""
    if device not in DEVICES:
        raise ConfigError(f"device={device} is not one of {', '.join(DEVICES)}")


def measure(case: Case, device: torch.device) -> list[Error]:
    """Return the errors of a case's ops in every dtype."""
    errors = []
    for dtype in TOLERANCES:
        torch.manual_seed(0)
        inputs = case.make(ROWS, WIDTH, dtype, device)
        expected = case.reference(_map(lambda x: x.double() if x.is_floating_point() else x, inputs))
        found = case.ours(deepcopy(inputs))
        # `zip` omits the empty backward results of a case with a single op.
        for op, ours, theirs in zip(case.ops, found, expected, strict=False):
            errors.append(Error(op, dtype, largest_error(ours, theirs)))
    return errors


def largest_error(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Return the largest error, relative to the largest value of its tensor; NaN if values are NaN or shapes differ."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("nan")
    values = [(a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9) for a, b in zip(ours, theirs, strict=True)]
    return torch.stack(values).max().item()


def _map(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    return {
        name: [change(each) for each in value] if isinstance(value, list) else change(value)
        for name, value in inputs.items()
    }


def _cell(errors: list[Error]) -> str:
    return " ".join(f"{error.value:.1e}{'' if error.fine else ' !'}" for error in errors)
