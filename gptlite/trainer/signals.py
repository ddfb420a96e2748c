"""Stop requests by SIGINT, SIGTERM, SIGUSR1 or a time limit, which the loop handles between two steps."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

import torch
from torch import Tensor

from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.mesh import Mesh

POLL_EVERY = 8  # evaluation batches between two exchanges with all ranks
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is what `sbatch --signal=USR1@120` sends
SAME_SECONDS = 2.0  # signals closer to each other than this are one request


class StopSignal:
    """Context manager in which the first of SIGNALS sets `received`, and one after SAME_SECONDS ends the process.

    Earlier repeats are ignored: `timeout` signals its command and then its group, and under torchrun and srun a signal
    to the whole job arrives again through the launcher. Such a repeat would end the process without its checkpoint, or
    with another exit code. As it may arrive after everything is saved, the handlers stay installed after a request.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0  # when, by time.monotonic()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items() if self.received is None else ():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._request(number)
        elif time.monotonic() - self._since > SAME_SECONDS:
            # Die by the signal itself, so that the parent sees the right exit status.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _request(self, number: int) -> None:
        self.received, self._since = number, time.monotonic()
        # Not print: the signal may have interrupted one, and the same Ctrl-C may have closed the terminal or pipe.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: saving after this step (again: stop at once)\n".encode())


class Stopping:
    """Agreement of all ranks on stopping: a signal to any rank, rank 0's time limit, or a failed background save.

    Ranks must stop at the same step, or one would wait for another that has left. Each step includes the flags in its
    own all-reduce (`words`, `heard`); outside a step, `poll` reduces them.
    """

    def __init__(
        self,
        mesh: Mesh,
        stop: StopSignal,
        over: Callable[[], bool] = lambda: False,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._mesh, self._stop, self._over, self._failed = mesh, stop, over, failed
        self._signal: int | None = None
        self._time_over = self._save_failed = False
        self._polls = 0

    @property
    def signal(self) -> int | None:
        """The signal that was received by any rank, if any."""
        return self._known()._signal

    @property
    def now(self) -> bool:
        """True if the run is to stop before the next step."""
        return self.signal is not None or self._time_over or self._save_failed

    @property
    def save_failed(self) -> bool:
        """True if a background save has failed, the same on all ranks."""
        return self._known()._save_failed

    def poll(self) -> bool:
        """Return `now`. Every POLL_EVERY calls, flags are exchanged first. Collective."""
        self._polls += 1
        if self._mesh.world_size > 1 and self._polls % POLL_EVERY == 1:  # all ranks count alike, so all take part
            self.heard(all_reduce(self.words().to(self._mesh.device), self._mesh).tolist())
        return self.now

    def poll_signal(self) -> bool:
        """Return True if any rank has received a signal, after a `poll`. Collective."""
        self.poll()
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as in a shell; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def words(self) -> Tensor:
        """Return this rank's flags, float64[5], to be summed over the ranks."""
        return torch.tensor(
            [
                *(self._stop.received == number for number in SIGNALS),
                self._mesh.is_main and self._over(),  # only rank 0's clock counts, as clocks differ between ranks
                self._failed(),
            ],
            dtype=torch.float64,
        )

    def heard(self, sums: Sequence[float]) -> None:
        """Update from the sums of all ranks' flags."""
        for number, count in zip(SIGNALS, sums, strict=False):  # two more flags follow those of the signals
            if count and self._signal is None:
                self._signal = number
        self._time_over, self._save_failed = sums[-2] > 0, sums[-1] > 0

    def _known(self) -> "Stopping":
        if self._mesh.world_size == 1:  # no other rank, so no exchange
            self.heard(self.words().tolist())
        return self
