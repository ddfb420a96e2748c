"""Lives are composed from presets that the process they are forked from has composed: half of a short life's time."""

import composition
from checkpoint.destruction.lives import TINY

from gptlite.config import compose, load

compose.compose = composition.compose
load([*TINY, "run.dir=unused"])
