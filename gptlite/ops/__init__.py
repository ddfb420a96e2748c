"""Ops of the models, one public function each, with a reference and a fused path. Import an op from its own module."""
