"""Certificates of layouts, for which a layout is reduced to what one machine can run, and a fuzz of all layouts."""
