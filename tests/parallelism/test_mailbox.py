"""What ranks leave for each other in the store."""

import time
from datetime import timedelta

import torch.distributed as dist

from gptlite.parallelism import mailbox
from gptlite.parallelism.mailbox import Mailbox


def open_store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_the_first_verdict_is_every_ranks():
    store = open_store()
    ranks = [Mailbox(store, "run", rank, 2, 0.1) for rank in range(2)]
    assert [rank.verdict() for rank in ranks] == [None, None]
    ranks[1].leave_verdict("rank 0 is stuck")
    ranks[0].leave_verdict("the connection was closed")
    assert [rank.verdict() for rank in ranks] == ["rank 0 is stuck"] * 2
    for rank in ranks:
        rank.close()


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(mailbox, "ANSWER_SECONDS", 0.2)
    mail = Mailbox(open_store(), "run", 0, 1, 0.1)

    class Stopped:
        def check(self, keys):
            time.sleep(2)
            return False

    mail._last = Stopped()
    before = time.monotonic()
    assert mail.verdict() is None
    assert time.monotonic() - before < 1
    mail.close()
