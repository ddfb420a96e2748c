"""What tests of this folder share with those of the kernels."""

from kernels.loop import pytest_pyfunc_call  # noqa: F401
