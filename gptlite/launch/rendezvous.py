"""Rendezvous of the ranks of one machine: a store that listens on loopback only.

torch's c10d rendezvous listens on all interfaces, and unpickles what it finds in the store, so whoever reaches its port
runs code. Ranks of one launcher have nothing to negotiate.
"""

import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gptlite.errors import ConfigError

BACKEND = "gptlite-loopback"
ADDRESS = "127.0.0.1"  # not the name localhost, which may not resolve
PROBE_SECONDS = 5.0


def refuse_no_loopback() -> None:
    """Raise ConfigError if this machine's loopback interface does not work, as in a new network namespace.

    torch would try to connect for minutes.
    """
    try:
        with (
            socket.create_server((ADDRESS, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=PROBE_SECONDS),
        ):
            pass
    except OSError as error:
        raise ConfigError(
            f"the ranks of a machine connect through {ADDRESS}, which does not work here: {error.strerror or error}; "
            "enable the loopback interface, e.g. with `ip link set lo up`"
        ) from None


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of one launcher. `shutdown` has nothing to do: the store ends with the process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        refuse_no_loopback()
        self._run_id = parameters.run_id
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((ADDRESS, 0))  # any free port
            self._port = listener.getsockname()[1]
        except OSError:
            listener.close()
            raise
        # torch listens on the socket that it is given, and would bind one of its own to all interfaces.
        self._store = TCPStore(
            ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        """Return the name under which this class is registered."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the launcher's store instead of starting one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and this launcher as the only one."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        """Return False: there is no other launcher that could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing, as `is_closed`."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other launcher can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id that the launcher was given."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True."""
        return True


rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
