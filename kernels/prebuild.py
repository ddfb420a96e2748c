"""`build`: compilation of the kernels, unless they are in the cache, and a check that they load.

gptlite kernels build [cuda=auto] [arch=auto]

cuda: `auto` compiles the CUDA kernels if there is a GPU; `true` even without a GPU, as on the login node of a cluster
with a shared home; `false` never. arch: `auto` compiles for the architecture of the local GPU; `any`, or `auto`
without a GPU, compiles for sm_80 and sm_90 and includes PTX for later GPUs; a number such as 90 compiles for that
architecture. Exit codes: 0 if everything requested is built, else 1.
"""

import ctypes
import re
from dataclasses import dataclass

import torch

from gptlite.errors import ConfigError
from gptlite.kernels.library import prepare
from gptlite.kernels.toolchain import BuildError

CHOICES = ("auto", "true", "false")


@dataclass
class Options:
    """Command-line options."""

    cuda: str = "auto"
    arch: str = "auto"


def run(options: Options) -> int:
    """Build the library, print a summary, and return the exit code. Raises ConfigError."""
    if options.cuda not in CHOICES:
        raise ConfigError(f"cuda={options.cuda} is not one of {', '.join(CHOICES)}")
    if not re.fullmatch(r"auto|any|\d{2,3}[af]?", options.arch):
        raise ConfigError(f"arch={options.arch} is not auto, any or an architecture such as 80 or 90")
    arch = {"auto": None, "any": ""}.get(options.arch, options.arch)
    cuda = torch.cuda.is_available() if options.cuda == "auto" else options.cuda == "true"
    try:
        library = prepare(cuda, print, arch)
        ctypes.CDLL(str(library.path))  # checks that the library loads
    except (BuildError, OSError) as error:
        print(f"no kernels: {error}")
        return 1
    record = library.record
    took = f"compiled earlier in {record.seconds:.0f} s" if library.cached else f"compiled in {record.seconds:.0f} s"
    compilers = " and ".join(filter(None, (record.compiler, record.nvcc)))
    print(f"{library.path}\n{'CPU and CUDA' if record.cuda else 'CPU'} kernels, {took}, by {compilers}")
    if cuda and not record.cuda:
        print(f"no CUDA kernels: {library.why_no_cuda}")
        return 1
    return 0
