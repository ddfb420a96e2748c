"""Errors of stacks with factors of their own and of rows kept for the check, and the spread of a preset's runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from gptlite.satellites.plan.cache import cached
from plan.published import megatron, mpt, titan
from plan.published.fit import fit_point, moved
from plan.published.row import Row
from plan.published.rows import deepspeed_rows, megatron_rows
from plan.published.stacks import fitted_cluster, fitted_rows
from plan.published.tables import MEGATRON
from plan.published.unseen import unseen_rows

PRESETS = ("dgx-2-v100", "a100-40gb", "a100-80gb", "dgx-a100", "dgx-h100")
BLOOM = "BLOOM's layouts"
TAILS = 5  # percent of the runs of a preset that are left out at each end of its spread


class Errors(NamedTuple):
    """Summary of relative errors."""

    rows: int
    mean: float
    bias: float
    largest: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """The summary of some errors."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), sum(sizes) / len(sizes), sum(errors) / len(errors), max(sizes))

    def cells(self) -> str:
        """The cells of a table's row."""
        return f"{self.mean:.1%} | {self.bias:+.1%} | {self.largest:.1%}"


@cache
def checked() -> dict[str, list[Row]]:
    """The rows to which nothing was fitted, by what the page calls them."""
    found: dict[str, list[Row]] = {"MPT on A100s": [], "MPT on H100s": []}
    for row in mpt.unfitted_rows():
        found[f"MPT on {row.stack[-4:]}s"].append(row)
    llama = titan.unfitted_rows()
    found["torchtitan"] = [row for row in llama if row.work.layout.context == 1]
    found["torchtitan, context parallel"] = [row for row in llama if row.work.layout.context > 1]
    found["Megatron-LM of 2022"] = megatron.korthikanti_rows()
    found["Megatron-Core, settings guessed"] = megatron.core_rows()
    found[BLOOM] = megatron.bloom_rows()
    return found


@cached(lambda row: row.name)
def fitted_error(row: Row) -> float:
    """The error with the factors of the row's stack, which for Megatron's are the constants of its table of 2021."""
    cluster = fitted_cluster(row)
    if row.stack in (megatron.STACK, megatron.BLOOM):
        cluster = moved(cluster, MEGATRON.constants, np.array(_megatron()))
    return row.error(cluster)


@cache
def _megatron() -> tuple[float, ...]:
    return tuple(fit_point(MEGATRON.rows, MEGATRON.constants).tolist())


@cached(lambda row: row.name)
def sheet_error(row: Row) -> float:
    """The error by data sheets."""
    return row.error()


def spread(name: str) -> list[float]:
    """Between which times their planned time nine of ten published runs on a preset's devices took, in hundredths."""
    rows = [*megatron_rows(), *deepspeed_rows(), *unseen_rows(), *fitted_rows()]
    rows += [row for some in checked().values() for row in some]
    times = [1 + sheet_error(row) for row in rows if row.cluster == name and row.counted]
    return [round(float(each), 2) for each in np.percentile(times, [TAILS, 100 - TAILS])]


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's correlation of the published with the predicted order of some rows, by data sheets."""
    published = np.array([row.published for row in rows])
    predicted = np.array([row.published * (1 + sheet_error(row)) for row in rows])
    first, second = (np.argsort(np.argsort(each)) for each in (published, predicted))
    return float(np.corrcoef(first, second)[0, 1])
