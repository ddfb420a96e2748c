"""Verdicts of the fuzz: whether a configuration trains as one process does, or is refused as it should be."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from gptlite.config.schema import Config
from gptlite.satellites.certify.fuzz.axes import Draw, model_overrides, overrides, replaced, world
from gptlite.satellites.certify.fuzz.legal import composed
from gptlite.satellites.certify.fuzz.ranks import RankError, RankPool
from gptlite.satellites.certify.fuzz.run import compare_layout, save_first_step, write_reference

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

    def judge(self, draw: Draw, quick: bool = False) -> Judgement:
        """Return the outcome of training a legal draw. With `quick`, it hangs after a quarter of the time."""
        timeout = self.timeout / 4 if quick else self.timeout
        config = self.layout(draw)
        try:
            reference = self._reference(draw)
            same, message, errors = self.ranks.run(world(draw), self.compared, config, reference, timeout=timeout)[0]
        except TimeoutError as error:
            return Judgement("hang", str(error))
        except RankError as error:
            late = re.search(r"ConfigError", error.error) is not None
            return Judgement("late" if late else "crash", error.error)
        return Judgement("ok" if same else "parity", message, errors)

    def layout(self, draw: Draw) -> Config:
        """Return the configuration of a draw."""
        return composed(overrides(draw))

    def judge_resumed(self, draw: Draw) -> Judgement:
        """Return the outcome of resuming: what a legal draw saves after a step is resumed by one process, and what one
        process saves by the draw. The second step must be that of one process without a checkpoint. The kind of a
        failure is resume."""
        alone, layout = (
            replaced([*values, f"run.dir={self._folder.name}/{uuid4().hex}"])
            for values in (model_overrides(draw), overrides(draw))
        )
        try:
            reference = self._reference(draw)
            for source, target in ((layout, alone), (alone, layout)):
                worlds = [world(draw) if each is layout else 1 for each in (source, target)]
                saved = self.ranks.run(worlds[0], save_first_step, composed(source), timeout=self.timeout)[0]
                config = composed(replaced([*target, f"checkpoint.resume={saved}", f"run.dir={saved}-resumed"]))
                same, message, _ = self.ranks.run(
                    worlds[1], compare_layout, config, reference, True, timeout=self.timeout
                )[0]
                if not same:
                    return Judgement("resume", f"saved on {worlds[0]}, resumed on {worlds[1]} ranks: {message}")
        except (TimeoutError, RankError) as error:
            return Judgement("resume", error.error if isinstance(error, RankError) else str(error))
        return Judgement("ok")

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
