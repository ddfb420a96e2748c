"""Recipes that turn corpora into tokens. Installed as gptlite.recipes, run as programs, and never imported."""
