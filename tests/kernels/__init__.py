"""Tests of the kernels. A package, lest another `kernels` be taken for it."""
