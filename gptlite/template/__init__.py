"""A model and a dataset, which are registered with gptlite when this package is imported."""

from gptlite.data.registry import register_data
from gptlite.models.registry import register_model
from gptlite.template.data import SpiralsConfig, open_spirals
from gptlite.template.model import MLPSpec

register_model(MLPSpec())
register_data("template", SpiralsConfig, open_spirals)
