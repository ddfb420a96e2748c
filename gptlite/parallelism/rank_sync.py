"""Actions that run on one rank or on all, and whose results and exceptions all ranks receive.

These are for work of unknown duration, such as reading a corpus or hashing a checkpoint. Waiting ranks poll the process
group's store, so no collective is in progress and no timeout ends the run. If a rank dies, the launcher detects it and
ends the others.

Threads that run in parallel with training must pass a separate process group in `group`, since the store connection and
the world group belong to the training thread. Results are then sent by collectives, which raise an error on the
other ranks if a rank dies or hangs.
"""

from __future__ import annotations

import pickle
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gptlite.parallelism.mesh import Mesh

T = TypeVar("T")
ALONE = Mesh(torch.device("cpu"))  # a single process
# Waits are split into short ones, since Python runs signal handlers only between calls.
PIECE = timedelta(seconds=1)


def from_main(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on rank 0 only and return its result on every rank. An exception is raised on every rank.

    Results and exceptions are pickled. All ranks must call this within the time limit of a collective. Without a
    `group`, the action itself has no time limit.
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
    answer, own_error = None, None
    if group is not None:
        if mesh.rank in sources:
            answer, own_error = _run_packed(mesh.rank, action)
        gathered: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(gathered, answer, group=group)
        return _unpack([pickle.loads(gathered[rank]) for rank in sources], sources, mesh.rank, own_error)
    store: Any = dist.distributed_c10d._get_default_store()
    # The name is unique across calls and runs, as a restarted run may find the previous run's store.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0, device=mesh.device)
    keys = [f"{name[0]}/{rank}" for rank in sources]
    if mesh.rank in sources:
        answer, own_error = _run_packed(mesh.rank, action)
        store.set(f"{name[0]}/{mesh.rank}", answer)
    while not _keys_exist(store, keys):
        pass
    answers = [pickle.loads(answer) for answer in store.multi_get(keys)]
    if store.add(f"{name[0]}/read", 1) == mesh.world_size:  # the last reader deletes the keys
        for key in (*keys, f"{name[0]}/read"):
            store.delete_key(key)
    return _unpack(answers, sources, mesh.rank, own_error)


def _unpack(answers: list[Any], sources: Sequence[int], own_rank: int, own_error: BaseException | None) -> list[Any]:
    """Return the results of the ranks that ran the action, or raise the exception of the first rank that failed."""
    for rank, (raised, content, words) in zip(sources, answers, strict=True):
        if raised:
            raise own_error if own_error is not None and rank == own_rank else _unpack_error(content, words)
    return [pickle.loads(content) for _, content, _ in answers]


def _keys_exist(store: Any, keys: list[str]) -> bool:
    """Wait up to PIECE and return True if all keys exist. Raises DistNetworkError if the store itself is gone."""
    with suppress(dist.DistStoreError):  # timed out
        store.wait(keys, PIECE)
        return True
    return False


def _run_packed(rank: int, action: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Run an action; return pickled (raised, pickled result or exception, traceback text), and the exception itself."""
    try:
        # Pickled twice, so that the outer tuple can be read on a rank that cannot load the result.
        return pickle.dumps((False, pickle.dumps(action()), "")), None
    except BaseException as error:  # includes KeyboardInterrupt, as the other ranks wait for an answer
        words = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
        try:
            content = pickle.dumps(error)
        except Exception:
            content = b""
        return pickle.dumps((True, content, words)), error


def _unpack_error(content: bytes, words: str) -> BaseException:
    try:
        error = pickle.loads(content)
        error.add_note(words)
    except Exception:  # the exception cannot be pickled, or its class is unknown on this rank
        error = RuntimeError(words)
    return error
