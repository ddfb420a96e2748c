"""Meeting of the ranks of a world: who is there, the largest layout, and the group of the ranks that train."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, printable
from gptlite.launch.elastic import going_on
from gptlite.launch.starter import Starter
from gptlite.parallelism.collectives import broadcast_text, gather_bytes
from gptlite.parallelism.process_group import join, leave_group
from gptlite.satellites.elastic.attendance import Attendance
from gptlite.satellites.elastic.degree import largest, ranks_per_copy, too_few
from gptlite.satellites.elastic.disk import write_to_disk
from gptlite.satellites.elastic.exchange import hand_over
from gptlite.satellites.elastic.proxy import START_SECONDS
from gptlite.satellites.elastic.roster import Member, Roster, merged
from gptlite.satellites.elastic.shelf import Shelf

PIECE = timedelta(seconds=1)
GOODBYE_SECONDS = 3.0
OVER = "over"


class Meeting:
    """Context manager of a world. On entry, all ranks join, tell each other what they know, and those that train form
    the group; on exit after success, the group is left.

    `active` says whether this rank trains, with `config`. A rank that is not active has nothing to do but `wait`.
    """

    def __init__(self, config: Config, node: Starter, shelf: Shelf, attendance: Attendance) -> None:
        self._node, self._shelf, self._attendance = node, shelf, attendance
        self.config, self.active = config, True
        self._spares = 0
        self._store: TCPStore | None = None

    def __enter__(self) -> Meeting:
        node, seconds = self._node, self.config.parallelism.timeout_seconds
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if agents and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not set, so torchrun's agents would not find a new first node "
                "after a loss; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
            )
        self._store = TCPStore(
            node.master_address,
            node.master_port,
            node.world_size,
            is_master=node.rank == 0 and not agents,
            timeout=timedelta(seconds=max(seconds, START_SECONDS)),
            wait_for_workers=False,
        )
        # The store of a launcher on one node outlives its worlds, which are counted there.
        world = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/" if agents else ""
        if self._store.add(f"{world}come", 1) == node.world_size:
            self._store.set(f"{world}here", "")
        self._store.wait([f"{world}here"])  # for the imports of a node that joins, whatever a collective may take
        self._store.set_timeout(timedelta(seconds=seconds))
        place = PrefixStore(f"{world}all", self._store), node.rank, node.world_size
        if node.world_size > 1:
            join(seconds, place=place)
        members = self._members()
        roster = merged(members)
        self.config = self._agreed(roster)
        self._attendance.meet(members, replace(roster, config=to_yaml(self.config)))
        count = largest(self.config, node.world_size)
        if count < node.world_size:
            self._part(count, PrefixStore(f"{world}active", self._store))
        if node.rank == 0:
            self._attendance.take_over(Path(self.config.run.dir).expanduser())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self.active:
            leave_group()
        self._store = None

    def over(self, code: int) -> None:
        """Tell the ranks that wait that the run has ended with an exit code."""
        if self._spares and self._node.rank == 0:
            assert self._store is not None
            self._store.set(OVER, str(code))
            until = time.monotonic() + GOODBYE_SECONDS
            with suppress(dist.DistError):
                while self._store.add("bye", 0) < self._spares and time.monotonic() < until:  # it ends with this rank
                    time.sleep(0.05)

    def wait(self) -> int:
        """Wait, without a core, until the run has ended, and return its exit code. A signal ends the wait."""
        assert self._store is not None
        until = time.monotonic() + self.config.parallelism.timeout_seconds
        while True:
            with suppress(dist.DistStoreError):  # not yet
                self._store.wait([OVER], PIECE)
                code = int(self._store.get(OVER))
                self._store.add("bye", 1)
                return code
            if self._spares == self._node.world_size and time.monotonic() > until:
                return 1

    def _members(self) -> list[Member]:
        own = self._attendance.member()
        if self._node.world_size == 1:
            return [own]
        texts = gather_bytes(json.dumps(asdict(own)).encode())
        return [Member(**{**(fields := json.loads(text)), "roster": Roster(**fields["roster"])}) for text in texts]

    def _agreed(self, roster: Roster) -> Config:
        """Return the configuration of the run, which a node that comes later takes from the others."""
        if roster.config:
            return going_on(from_yaml(roster.config, "the run's configuration"))
        if self._node.world_size == 1:
            return self.config
        return from_yaml(broadcast_text(to_yaml(self.config)), "rank 0's configuration")

    def _part(self, count: int, store: PrefixStore) -> None:
        """Leave the group of all ranks, and join that of the first `count`, unless this rank is a spare."""
        node = self._node
        if count:
            hand_over(self._shelf, count)
        else:
            write_to_disk(self._shelf, self.config)
            self._say_too_few()
        leave_group()
        self._spares, self.active = node.world_size - count, node.rank < count
        if self.active and count > 1:
            os.environ["WORLD_SIZE"] = str(count)
            join(self.config.parallelism.timeout_seconds, place=(store, node.rank, count))

    def _say_too_few(self) -> None:
        ranks, seconds = self._node.world_size, self.config.parallelism.timeout_seconds
        if self._node.rank == 0:
            line = (
                f"too few ranks ({ranks}) for parallelism.tensor x pipeline x context = {ranks_per_copy(self.config)}; "
                f"waiting up to parallelism.timeout_seconds={seconds:g} for more nodes; {too_few(self.config, ranks)}"
            )
            print(printable(line), file=sys.stderr, flush=True)
