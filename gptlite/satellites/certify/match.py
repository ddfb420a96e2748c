"""Match of a run with a certificate: what differs from the configuration, the sources and the versions it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptlite.checkpoint.compare import Effect, effect_of, flatten
from gptlite.config.batch import check_world
from gptlite.config.saved import to_dict
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.progress import counted
from gptlite.satellites.certify.certificate import FILE_NAME, Certificate, read
from gptlite.satellites.certify.sources import gptlite_digest, model_digest, versions

SECTIONS = ("model.", "parallelism.", "precision.", "schemas.model", "schemas.optimizer", "data.packing")
IGNORED = ("parallelism.auto", "parallelism.spread")  # they are resolved to degrees


def resolved(config: Config, world: int) -> Config:
    """Return a configuration with the data degree of `world` ranks. Raises ConfigError if it cannot run on so many."""
    layout = check_world(config, world)
    return replace(config, parallelism=replace(config.parallelism, data=layout.data_size))


def differences(certificate: Certificate, config: Config, world: int) -> Iterator[str]:
    """Yield what of a run on `world` ranks is not as certified: its settings or, if these are, sources and versions."""
    yield from list(of_settings(certificate, config, world)) or of_sources(certificate, config)


def of_settings(certificate: Certificate, config: Config, world: int) -> Iterator[str]:
    """Yield e.g. `it is for parallelism.tensor=4, this run has 8` for each key that changes what was certified, and
    what failed."""
    if not certificate.passed:
        failed = [row["stage"] for row in certificate.rows if row["passed"] is False]
        yield f"its {' and '.join(failed)} failed"
    before, after = flatten(certificate.config), flatten(to_dict(resolved(config, world)))
    for key in after:
        then, now = before.get(key, "absent"), after[key]
        if not key.startswith(SECTIONS) or key in IGNORED or effect_of(key) is Effect.safe or then == now:
            continue
        if key == "model.vocab_size" and then is None:  # the data's, which a run knows
            continue
        name = key.removeprefix("schemas.")
        yield f"it is for {name}={_short(then)}, this run has {_short(now)}"


def of_sources(certificate: Certificate, config: Config) -> Iterator[str]:
    """Yield what has changed in source files and versions since. The model is built, without memory."""
    if model_digest(config) != certificate.model_digest:
        yield "the source of the model or of its plug-ins has changed"
    if gptlite_digest() != certificate.gptlite_digest:
        yield "the source of gptlite has changed"
    now = versions(config)
    for name, then in certificate.versions.items():
        if name != "python" and now.get(name, "none") != then:
            yield f"it is for {name} {then}, this run has {now.get(name, 'none')}"


def certificate_words(config: Config, world: int, folder: Path) -> str:
    """Return the line of a run's log on the certificates in a folder; an empty string if there are none."""
    files = sorted(folder.glob(f"*/{FILE_NAME}"))
    if not files:
        return ""
    nearest: tuple[int, str] | None = None
    for file in files:
        try:
            certificate = read(file)
            reasons = list(differences(certificate, config, world))
        except ConfigError as error:
            reasons = [str(error)] * 99
        if not reasons:
            skipped = [row["stage"] for row in certificate.rows if row["passed"] is None]
            without = f", without {' and '.join(skipped)}" if skipped else ""
            return f"certificate: {file} covers this run ({certificate.created:.10}{without})"
        more = f", and {len(reasons) - 1} more" if 1 < len(reasons) < 99 else ""
        words = reasons[0] if len(reasons) == 99 else f"{file}: {reasons[0]}{more}"
        nearest = min(filter(None, (nearest, (len(reasons), words))))
    assert nearest is not None
    return f"certificate: none of {counted(len(files), 'certificate')} covers this run; {nearest[1]}"


def _short(value: Any) -> str:
    return str(value).removesuffix("_schema")
