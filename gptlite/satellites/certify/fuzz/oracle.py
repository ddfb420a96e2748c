"""Verdicts of the fuzz: whether a configuration trains as one process does, or is refused as it should be."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptlite.satellites.certify.fuzz.axes import Draw, model_overrides, overrides, world
from gptlite.satellites.certify.fuzz.legal import composed
from gptlite.satellites.certify.fuzz.ranks import RankError, RankPool
from gptlite.satellites.certify.fuzz.run import compare_layout, write_reference

STEPS = 2  # the second has been through an update and its state


@dataclass(frozen=True)
class Judgement:
    """Judgement of one configuration. `kind` is ok, or what has failed: parity, crash, hang, or late (refused only
    after ranks were started); `errors` has the largest errors if the layout has trained."""

    kind: str
    message: str = ""
    errors: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if nothing has failed."""
        return self.kind == "ok"


class Oracle:
    """Runs draws on ranks that stay, and compares them with one process, whose steps are kept by model."""

    def __init__(self, ranks: RankPool, timeout: float = 120.0, compared: Callable[..., Any] = compare_layout) -> None:
        self.ranks, self.timeout, self.compared = ranks, timeout, compared
        self._folder = tempfile.TemporaryDirectory(prefix="gptlite-fuzz-")
        self._references: dict[tuple[str, ...], str] = {}
        self._count = 0  # a name is used once: ranks keep what they have read

    def close(self) -> None:
        """Delete the files of the references."""
        self._folder.cleanup()

    def judge(self, draw: Draw) -> Judgement:
        """Return the outcome of training a legal draw."""
        config = composed(overrides(draw))
        try:
            reference = self._reference(draw)
            same, message, errors = self.ranks.run(world(draw), self.compared, config, reference, timeout=self.timeout)[
                0
            ]
        except TimeoutError as error:
            return Judgement("hang", str(error))
        except RankError as error:
            late = re.search(r"ConfigError", error.error) is not None
            return Judgement("late" if late else "crash", error.error)
        return Judgement("ok" if same else "parity", message, errors)

    def _reference(self, draw: Draw) -> str:
        """Return the file with the steps of one process."""
        key = tuple(model_overrides(draw))
        if key not in self._references:
            exact = composed(model_overrides(draw, "fp32")) if draw["precision"] else None
            self._count += 1
            path = str(Path(self._folder.name) / f"{self._count}.pickle")
            self.ranks.run(1, write_reference, composed(key), exact, STEPS, path, timeout=self.timeout)
            for other in list(self._references)[:-4]:  # draws with the same model follow each other
                Path(self._references.pop(other)).unlink()
            self._references[key] = path
        return self._references[key]
