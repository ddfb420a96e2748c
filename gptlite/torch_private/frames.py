"""Files and functions of torch that tell, on a thread's stack, what the thread does."""

from pathlib import Path

import torch

DISTRIBUTED = f"{Path(torch.__file__).parent}/distributed/"
COLLECTIVES = (f"{DISTRIBUTED}distributed_c10d.py", f"{DISTRIBUTED}_functional_collectives.py")
BACKWARD = "_engine_run_backward"  # function of every backward pass
