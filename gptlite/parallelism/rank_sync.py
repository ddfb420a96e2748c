"""Actions that run on one rank or on all, and whose results and exceptions all ranks receive.

These are for work of unknown duration, such as reading a corpus or hashing a checkpoint. Waiting ranks poll the process
group's store, so no collective is in progress and no timeout ends the run. If a rank dies, the launcher detects it and
ends the others.

Threads that run in parallel with training must pass a separate process group in `group`, since the store connection and
the world group belong to the training thread. Results are then sent by collectives, which raise an error on the
other ranks if a rank dies or hangs.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gptlite.errors import named
from gptlite.parallelism.collectives import broadcast_bytes, gather_bytes
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.messages import decode, decode_error, encode, encode_error
from gptlite.torch_private.distributed import default_store

T = TypeVar("T")
ALONE = Mesh(torch.device("cpu"))  # a single process
# Waits are split into short ones, since Python runs signal handlers only between calls.
PIECE = timedelta(seconds=1)


def from_main(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on rank 0 only and return its result on every rank. An exception is raised on every rank.

    Results and exceptions are of the types that messages.py encodes. All ranks must call this within the time limit of
    a collective. Without a `group`, the action itself has no time limit.
    """
    if mesh.world_size == 1:
        return action()
    return _exchange(mesh, action, [0], group)[0]


def from_all(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run an action on every rank and return all results in rank order, on every rank.

    If the action raises on some ranks, every rank raises the exception of the lowest of them. In all other respects
    this is like `from_main`.
    """
    if mesh.world_size == 1:
        return [action()]
    return _exchange(mesh, action, range(mesh.world_size), group)


def together(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on every rank and return this rank's own result, of any type. If any rank raises, all raise."""
    own: list[T] = []  # the result is not sent, as it may not be picklable
    from_all(mesh, lambda: own.append(action()), group)
    return own[0]


def _exchange(mesh: Mesh, action: Callable[[], T], sources: Sequence[int], group: dist.ProcessGroup | None) -> list[T]:
    answer, own_error = b"", None
    if group is not None:
        if mesh.rank in sources:
            answer, own_error = _run_encoded(mesh.rank, action)
        gathered = gather_bytes(answer, group)
        return _decoded([gathered[rank] for rank in sources], sources, mesh.rank, own_error)
    store = default_store()
    # The name is unique across calls and runs, as a restarted run may find the previous run's store.
    name = broadcast_bytes(uuid.uuid4().hex.encode()).decode()
    keys = [f"{name}/{rank}" for rank in sources]
    if mesh.rank in sources:
        answer, own_error = _run_encoded(mesh.rank, action)
        store.set(f"{name}/{mesh.rank}", answer)
    while not _keys_exist(store, keys):
        pass
    answers = store.multi_get(keys)
    if store.add(f"{name}/read", 1) == mesh.world_size:  # the last reader deletes the keys
        for key in (*keys, f"{name}/read"):
            store.delete_key(key)
    return _decoded(answers, sources, mesh.rank, own_error)


def _decoded(answers: list[bytes], sources: Sequence[int], own_rank: int, own_error: BaseException | None) -> list[Any]:
    """Return the results of the ranks that ran the action, or raise the exception of the first rank that failed."""
    results = []
    for rank, answer in zip(sources, answers, strict=True):
        result, error, words = decode(answer)
        if words:
            raise own_error if own_error is not None and rank == own_rank else _with_words(decode_error(error), words)
        results.append(result)
    return results


def _keys_exist(store: Any, keys: list[str]) -> bool:
    """Wait up to PIECE and return True if all keys exist. Raises DistNetworkError if the store itself is gone."""
    with suppress(dist.DistStoreError):  # timed out
        store.wait(keys, PIECE)
        return True
    return False


def _run_encoded(rank: int, action: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Run an action; return the message (result, encoded exception, traceback text), and the exception itself."""
    try:
        return encode((action(), b"", "")), None
    except BaseException as error:  # includes KeyboardInterrupt, as the other ranks wait for an answer
        if isinstance(error, OSError):
            named(error)  # here, where its traceback is
        words = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
        return encode((None, encode_error(error), words)), error


def _with_words(error: BaseException | None, text: str) -> BaseException:
    """Return the error of another rank with its traceback text; None stands for an exception that cannot be sent."""
    if error is None:
        return RuntimeError(text)
    error.add_note(text)
    return error
