"""Tests of types: see docs/certify_types.md."""
