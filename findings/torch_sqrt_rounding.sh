#!/bin/sh
# torch 2.13.0 (MKL, x86): Tensor.sqrt on the CPU is not the correctly rounded square root of IEEE 754.
#
# The processor's instruction, math.sqrt and numpy.sqrt return the nearest floating-point number. torch's sqrt is up to
# one unit in the last place away from it, for one of five float32 values and one of seventy float64 values, contiguous
# or not. pow(0.5) has the same error. So moving one square root between the host and a tensor changes the last bit, and
# a program that is compared bit by bit with another framework has to take its roots in the same place.
# Seen with torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0 on an AMD EPYC with AVX-512, whatever ATEN_CPU_CAPABILITY is, with
# Python 3.11 on 2026-11-29. Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import numpy as np
import torch

COUNT = 100_000
wide = torch.rand(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
print(f"torch {torch.__version__}, MKL {torch.backends.mkl.is_available()}, numpy {np.__version__}")
assert np.sqrt(wide.numpy()).tolist() == [math.sqrt(value) for value in wide.tolist()]
for values, integer, least in ((wide, np.int64, COUNT // 200), (wide.float(), np.int32, COUNT // 20)):
    expected = np.sqrt(values.numpy())
    for name, roots in (("sqrt()", values.sqrt()), ("pow(0.5)", values.pow(0.5))):
        distance = np.abs(roots.numpy().view(integer) - expected.view(integer))
        print(f"{values.dtype} {name}: {np.count_nonzero(distance):,} of {COUNT:,} differ, by at most {distance.max()}")
        if np.count_nonzero(distance) < least or distance.max() != 1:
            raise SystemExit(f"{name} of {values.dtype} is now rounded differently")
PYTHON
