"""Ranks of another launcher that do not meet: a line while a rank waits, and one line instead of torch's error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer

import torch.distributed as dist

from gptlite.errors import ConfigError
from gptlite.launch.starter import Starter

PATIENCE_SECONDS = 20.0  # ranks of a launcher meet sooner, unless a machine starts slowly


@contextmanager
def meeting(rank: Starter, names: Sequence[str], timeout_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Context manager in which a rank joins the others, for up to `timeout_seconds`.

    `tell` prints a line once the rank has waited for PATIENCE_SECONDS. Raises ConfigError if it does not meet the
    others. Both name the environment variables that made this process a rank, which may be those of an earlier run.
    """
    who = f"rank {rank.rank} of {rank.world_size}"
    place = f"at {rank.master_address}:{rank.master_port}"
    stale = f"if this process is not a rank of that run, unset {' '.join(names)}, from which it was read"
    timer = Timer(PATIENCE_SECONDS, tell, [f"{who} is waiting for the others {place}; {stale}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError):
        raise ConfigError(
            f"{who} did not meet the others {place} in parallelism.timeout_seconds={timeout_seconds:g}; {stale}; "
            "else start all ranks, and let their machines reach each other"
        ) from None
    finally:
        timer.cancel()
