"""Recipes: how each corpus becomes tokens. Installed as gptlite.recipes, run as programs, never imported."""
