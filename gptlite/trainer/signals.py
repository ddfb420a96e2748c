"""Stop requests from SIGINT, SIGTERM, SIGUSR1 or a time limit, which the loop handles between steps."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gptlite.parallelism.mesh import Mesh

POLL_EVERY = 8  # evaluation batches between exchanges of flags among ranks
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # `sbatch --signal=USR1@120` sends SIGUSR1
SAME_SECONDS = 2.0  # later signals within this time belong to the same request


class StopSignal:
    """Context manager that handles SIGNALS: the first one sets `received`, and one after SAME_SECONDS ends the process.

    Repeats within SAME_SECONDS are ignored, since they would end the process without its checkpoint, or with another
    exit code: `timeout` signals its command and then the process group, and under torchrun and srun, the launcher
    forwards a signal that the whole job also received. A repeat may arrive after everything is saved, so after a
    request the handlers stay installed on exit.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0  # time of the request, by time.monotonic()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items() if self.received is None else ():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def adopt(self, number: int) -> None:
        """Treat another rank's request as this rank's: the same signal may reach this rank when its run has ended."""
        if self.received is None:
            self.received, self._since = number, time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._request(number)
        elif time.monotonic() - self._since > SAME_SECONDS:
            # End by the signal's default action, so that the parent process gets the exit status of a signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _request(self, number: int) -> None:
        self.adopt(number)
        # Not print, which is not reentrant and may have been interrupted. Ctrl-C may also have closed the pipe.
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: saving after this step (a second signal stops at once)\n".encode())


class Stopping:
    """Stop decision shared by all ranks: a signal to any rank, rank 0's time limit, or a failed background save.

    Ranks must stop at the same step, or some would wait in a collective for ranks that have stopped. Each step adds the
    flags from `words` to its all-reduce and passes the sums to `heard`. Between steps, `poll` reduces the flags.
    `over` returns True after the time limit, and `failed` after a failed save of this rank.
    """

    def __init__(
        self,
        mesh: "Mesh",
        stop: StopSignal,
        over: Callable[[], bool] = lambda: False,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._mesh, self._stop, self._over, self._failed = mesh, stop, over, failed
        self._alone = mesh.world_size == 1  # nothing is exchanged, so each question is answered anew
        self._signal: int | None = None
        self._time_over = self._save_failed = False
        self._polls = 0

    @property
    def signal(self) -> int | None:
        """Number of the signal that any rank has received; None without a signal."""
        return self._stop.received if self._alone else self._signal

    @property
    def now(self) -> bool:
        """True if the run must stop before the next step."""
        time_over = self._over() if self._alone else self._time_over
        return self.signal is not None or time_over or self.save_failed

    @property
    def save_failed(self) -> bool:
        """True if a background save has failed on any rank."""
        return self._failed() if self._alone else self._save_failed

    def poll(self) -> bool:
        """Return `now`, after an exchange of flags in every POLL_EVERY-th call. Collective."""
        from gptlite.parallelism.collectives import all_reduce  # imports FSDP, which the launcher does without

        self._polls += 1
        if not self._alone and self._polls % POLL_EVERY == 1:  # equal on all ranks
            self.heard(all_reduce(self.words().to(self._mesh.device), self._mesh).tolist())
        return self.now

    def poll_signal(self) -> bool:
        """Call `poll`, and return True if any rank has received a signal. Collective."""
        self.poll()
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as in a shell; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def words(self) -> Tensor:
        """Return this rank's flags to sum over ranks, fp64 [5]: one per signal, time limit, failed save."""
        return torch.tensor(
            [
                *(self._stop.received == number for number in SIGNALS),
                self._mesh.is_main and self._over(),  # only rank 0's clock counts, as clocks differ between ranks
                self._failed(),
            ],
            dtype=torch.float64,
        )

    def heard(self, sums: Sequence[float]) -> None:
        """Update the decision from the flags of all ranks, summed."""
        for number, count in zip(SIGNALS, sums, strict=False):  # two more flags follow those of the signals
            if count and self._signal is None:
                self._signal = number
                self._stop.adopt(number)
        self._time_over, self._save_failed = sums[-2] > 0, sums[-1] > 0


class Clock:
    """Time limit `trainer.max_time`, with time for a save at the end.

    With a `lag`, the decision to stop reaches all ranks one step late, when up to two more steps are in progress.
    """

    def __init__(self, minutes: float | None, started: float, save_seconds: float, lag: int = 0) -> None:
        self.deadline = math.inf if minutes is None else started + 60 * minutes
        self.save_seconds, self._steps = save_seconds, 1.5 + 3 * lag
        self._step_seconds = 0.0
        self._mark = time.monotonic()

    def step(self) -> None:
        """Record the end of a step. A slower step raises the estimate at once, and faster steps lower it gradually."""
        now = time.monotonic()
        # A decaying maximum instead of a mean, since a low estimate could exceed the deadline.
        self._step_seconds, self._mark = max(0.9 * self._step_seconds, now - self._mark), now

    def mark(self) -> None:
        """Exclude the time since the last step from the duration of the next one."""
        self._mark = time.monotonic()

    def over(self) -> bool:
        """Return True if one more step and a save could exceed the deadline."""
        # Twice the duration of a save, as the next save may be slower than all before.
        return time.monotonic() + self._steps * self._step_seconds + 2 * self.save_seconds > self.deadline
