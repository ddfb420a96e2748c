#!/bin/sh
# torch 2.13.0, CPU build: code that torch.compile cached for AVX-512 is used again, with wrong results, where torch is
# limited to AVX2.
#
# ATEN_CPU_CAPABILITY=avx2 limits torch to AVX2, for example to compare two machines. torch.compile writes vector code for
# the widest instruction set that torch may use, with that number of lanes in its loops, and keeps it in
# TORCHINDUCTOR_CACHE_DIR (in the temporary folder if unset). The key of an entry does not have the instruction set: a
# second process that is limited to AVX2 takes the entry of the first, compiles its source for AVX2, and its results are
# wrong, without a warning. With an empty cache it computes as eager code does.
# A cache for each instruction set avoids this.
# Needs a CPU with AVX-512 and a C++ compiler; on others there is nothing to see, and the script says so.
# Seen with Python 3.11 on 2026-11-29: largest error 0 with AVX-512; 2.26, and in another run 6e8, with AVX2 and the cache
# of AVX-512; 0 with AVX2 and an empty cache. Exit 0: as described, or no AVX-512; 1: the behaviour has changed.
set -eu
grep -q avx512f /proc/cpuinfo || { echo "no AVX-512 here: nothing to see"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
cat >"$folder/compare.py" <<'PYTHON'
import torch

x = torch.arange(1.0, 65.0).repeat(4, 1)
out = torch.compile(lambda x: torch.softmax(x, -1) * 2 + 1)(x)
print(float((out - (torch.softmax(x, -1) * 2 + 1)).abs().max()))
PYTHON
error() { env TORCHINDUCTOR_CACHE_DIR="$folder/$1" $2 "$folder/venv/bin/python" "$folder/compare.py"; }
wide=$(error shared '')
limited=$(error shared ATEN_CPU_CAPABILITY=avx2)
alone=$(error own ATEN_CPU_CAPABILITY=avx2)
echo "largest error: AVX-512 $wide; AVX2 with the cache of AVX-512 $limited; AVX2 with an empty cache $alone"
python3 -c "
import sys
wide, limited, alone = map(float, sys.argv[1:])
sys.exit(not (wide < 1e-5 and alone < 1e-5 and not limited < 1e-2))" "$wide" "$limited" "$alone"
