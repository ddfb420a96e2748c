"""Certificates of layouts: a layout is reduced to what one machine can run, and checked in four stages."""
