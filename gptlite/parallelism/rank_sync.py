"""What one rank does for all, or each for itself, and all learn how it went.

For work whose length nobody knows beforehand: reading a corpus, hashing a checkpoint. Those who wait look into the
store that the process group was made with, so no collective is under way and no time limit ends the run. A rank that
died is noticed by the launcher, which ends the others.

Beside the training, in a thread of its own, the ranks agree by collectives of a group of its own instead (`group`): the
store's connection and the world's group are the training's. There a rank that died or hangs is an error.
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
ALONE = Mesh(torch.device("cpu"))  # a process by itself
# Waiting is cut into pieces, so that a signal's handler gets its turn.
PIECE = timedelta(seconds=1)


def from_main(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of an action that rank 0 alone takes, on every rank; what it raises is raised on every rank.

    Results and exceptions are pickled. To be called by all ranks, which must arrive within the collectives' time limit;
    the action itself may take any time, without a `group`.
    """
    if mesh.world_size == 1:
        return action()
    return _exchange(mesh, action, [0], group)[0]


def from_all(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's result of an action that all take, in the order of ranks, on every rank.

    If any raised, all raise what the lowest of those ranks did. For the rest as `from_main`.
    """
    if mesh.world_size == 1:
        return [action()]
    return _exchange(mesh, action, range(mesh.world_size), group)


def together(mesh: Mesh, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """This rank's own result of an action that all take, whatever it is; what any of them raises, all raise."""
    own: list[T] = []
    from_all(mesh, lambda: own.append(action()), group)
    return own[0]


def _exchange(mesh: Mesh, action: Callable[[], T], speakers: Sequence[int], group: dist.ProcessGroup | None) -> list[T]:
    answer, own_error = None, None
    if group is not None:
        if mesh.rank in speakers:
            answer, own_error = _packed(mesh.rank, action)
        heard: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(heard, answer, group=group)
        return _unpack([pickle.loads(heard[rank]) for rank in speakers], speakers, mesh.rank, own_error)
    store: Any = dist.distributed_c10d._get_default_store()
    # A name that no other call has, nor a run before this one: a restarted run may find the store of the last.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0, device=mesh.device)
    keys = [f"{name[0]}/{rank}" for rank in speakers]
    if mesh.rank in speakers:
        answer, own_error = _packed(mesh.rank, action)
        store.set(f"{name[0]}/{mesh.rank}", answer)
    while not _there(store, keys):
        pass
    answers = [pickle.loads(answer) for answer in store.multi_get(keys)]
    if store.add(f"{name[0]}/read", 1) == mesh.world_size:
        for key in (*keys, f"{name[0]}/read"):
            store.delete_key(key)
    return _unpack(answers, speakers, mesh.rank, own_error)


def _unpack(answers: list[Any], speakers: Sequence[int], own_rank: int, own_error: BaseException | None) -> list[Any]:
    """What the speakers' actions gave; raises what the first of them raised, this rank's own error as it is."""
    for rank, (raised, content, words) in zip(speakers, answers, strict=True):
        if raised:
            raise own_error if own_error is not None and rank == own_rank else _unpacked(content, words)
    return [pickle.loads(content) for _, content, _ in answers]


def _there(store: Any, keys: list[str]) -> bool:
    """Whether all keys are there within PIECE. Raises DistNetworkError where the store itself has gone."""
    with suppress(dist.DistStoreError):  # the time is over
        store.wait(keys, PIECE)
        return True
    return False


def _packed(rank: int, action: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """What came of an action: whether it raised; the result or exception, pickled; words on the exception."""
    try:
        return pickle.dumps((False, pickle.dumps(action()), "")), None
    except BaseException as error:  # Ctrl-C too: nobody may wait for an answer that never comes
        words = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
        try:
            content = pickle.dumps(error)
        except Exception:
            content = b""
        return pickle.dumps((True, content, words)), error


def _unpacked(content: bytes, words: str) -> BaseException:
    try:
        error = pickle.loads(content)
        error.add_note(words)
    except Exception:  # a class that does not pickle, or that is not known here
        error = RuntimeError(words)
    return error
