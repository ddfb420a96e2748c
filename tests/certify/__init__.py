"""Tests of certificates."""
