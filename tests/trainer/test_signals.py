"""What a second signal does: nothing at once, later the end."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from gptlite.parallelism.mesh import Mesh
from gptlite.trainer.signals import SAME_SECONDS, SIGNALS, Stopping, StopSignal


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_same_request_again_is_no_second_one(number: int, capfd: pytest.CaptureFixture) -> None:
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.received == number
    os.kill(os.getpid(), number)  # all is saved by now
    assert capfd.readouterr().err.count("saving after this step") == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_later_one_ends_the_process_by_that_signal(number: int) -> None:
    child = os.fork()
    if not child:
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
            stop._since -= SAME_SECONDS
            os.kill(os.getpid(), number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -number


@pytest.mark.parametrize("number", SIGNALS)
def test_a_request_of_another_rank_may_still_reach_this_one(number: int) -> None:
    """As srun signals one rank after the other: by then the others may have stopped."""
    with StopSignal() as stop:
        Stopping(Mesh(torch.device("cpu")), stop).heard([*(each == number for each in SIGNALS), 0, 0])
    os.kill(os.getpid(), number)


def test_without_a_request_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before
