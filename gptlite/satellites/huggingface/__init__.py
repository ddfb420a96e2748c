"""Conversion of models to and from Hugging Face's transformers."""
