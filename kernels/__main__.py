"""`python -m gptlite.kernels`, which is `gptlite kernels`."""

from gptlite.kernels.command import main

main()
