"""Certificates of layouts: what a layout was checked by before it is trained on, and a fuzz of all of them."""
