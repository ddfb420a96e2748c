#!/bin/sh
# omegaconf 2.3.1: a field of type list[int] accepts a list or a dict as an element, without an error.
#
# A structured configuration checks the types of scalars: "x" in a list[int] is refused. A container in the same place
# is accepted by merge, by the command line's dotlist and by to_object, so the typed object that a program gets holds a
# list or a dict where its annotation says int. The same holds for the values of dict[str, float].
# Seen with Python 3.11 on 2026-11-28. Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check omegaconf==2.3.1
"$folder/venv/bin/python" - <<'PYTHON'
from dataclasses import dataclass, field

from omegaconf import OmegaConf, ValidationError


@dataclass
class Schema:
    numbers: list[int] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)


try:
    OmegaConf.merge(Schema, {"numbers": ["x"]})
    raise SystemExit("a string in list[int] is no longer refused")
except ValidationError:
    print("a string in list[int]: ValidationError")

for given in ("numbers=[[1]]", "numbers=[{a: 1}]", "rates={a: [1]}"):
    try:
        found = OmegaConf.to_object(OmegaConf.merge(Schema, OmegaConf.from_dotlist([given])))
    except ValidationError as error:
        raise SystemExit(f"{given} is now refused: {error}") from None
    print(f"{given}: accepted as {found}")
    values = [*found.numbers, *found.rates.values()]
    assert values
    assert all(isinstance(value, list | dict) for value in values)
PYTHON
