"""The models there are. No torch here."""

from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.spec import ModelSpec

SPECS: list[ModelSpec] = [GPTSpec()]
