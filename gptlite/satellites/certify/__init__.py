"""Certification of a layout before it runs on a cluster."""
