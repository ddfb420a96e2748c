"""Ops of the models: one public function for each, with a reference path and a fused path. Import an op from its own
module."""
